"""Packed documents and labels of instructions, and what a model computes of them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from torch.nn import functional as F
from transformers import (
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

import neuronx_dist as nxd
from neuronx_dist import comm, hf
from neuronx_dist.comm.backends import threads
from neuronx_dist.data import encode_chat, encode_completion, pack
from tests.support.llama import tiny_llama
from tests.support.llama_training import distance, without_float32_inside

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [19, 20, 21, 22], [], [23, 24, 25, 26]]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} : {% if m.role == 'assistant' %}{% generation %}{{ m.content }} <end>"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}"
)


def tokens_of(columns: dict[str, list[list[int]]]) -> list[list[int]]:
    """The documents of packed rows, without padding."""
    found: list[list[int]] = []
    for row, places in zip(columns["input_ids"], columns["position_ids"]):
        for token, place in zip(row, places):
            if place == 0:
                found.append([])
            assert len(found[-1]) == place
            found[-1].append(token)
    return sorted(tokens for tokens in found if any(tokens))


@pytest.mark.parametrize("strategy", ["first_fit", "wrapped"])
def test_all_tokens_are_there_once(strategy: str) -> None:
    columns = pack({"input_ids": DOCUMENTS}, 8, strategy=strategy)
    assert all(len(row) == 8 for column in columns.values() for row in column)
    assert sorted(sum(tokens_of(columns), [])) == sorted(sum(DOCUMENTS, []))
    expected = {
        "first_fit": [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15, 16], [17, 18], [19, 20, 21, 22], [23, 24, 25, 26]],
        "wrapped": [[5, 6, 7], [8], [9, 10, 11, 12], [13, 14, 15, 16, 17, 18], [19, 20], [21, 22], [23, 24, 25, 26]],
    }
    assert tokens_of(columns) == expected[strategy] and len(columns["labels"]) == 3
    for ids, labels, places in zip(*columns.values()):
        assert all(
            label == (-100 if place == 0 or not token else token) for token, label, place in zip(ids, labels, places)
        )


def test_labels_of_documents_and_refusals() -> None:
    columns = pack({"input_ids": [[1, 2, 3]], "labels": [[-100, -100, 3]], "other": ["x"]}, 4, pad_token_id=9)
    assert columns == {"input_ids": [[1, 2, 3, 9]], "labels": [[-100, -100, 3, -100]], "position_ids": [[0, 1, 2, 0]]}
    with pytest.raises(ValueError, match="a document has 10 tokens, and a row 8: take longer rows"):
        pack({"input_ids": DOCUMENTS}, 8, long="refuse")
    with pytest.raises(ValueError, match="document 0 has 2 tokens and 1 labels"):
        pack({"input_ids": [[1, 2]], "labels": [[1]]}, 8)
    with pytest.raises(ValueError, match="strategy='bfd' must be"):
        pack({"input_ids": DOCUMENTS}, 8, strategy="bfd")
    with pytest.raises(ValueError, match="length=0"):
        pack({"input_ids": DOCUMENTS}, 0, strategy="wrapped")
    with pytest.raises(ValueError, match="1 of 2 documents have padding"):
        pack({"input_ids": [[1, 2], [3, 0]], "attention_mask": [[1, 1], [1, 0]]}, 8)


@pytest.mark.parametrize("mesh", [nxd.Mesh(1), nxd.Mesh(2, tp=2), nxd.Mesh(2, cp=2)], ids=["1", "tp2", "cp2"])
def test_a_model_computes_of_packed_documents_what_it_computes_of_each(mesh: nxd.Mesh) -> None:
    """The gradients of packed rows are those of the documents one by one."""

    def model() -> Any:
        torch.manual_seed(0)
        config = tiny_llama(num_hidden_layers=2, vocab_size=32)
        return without_float32_inside(LlamaForCausalLM(config).double(), torch.float64)

    documents = [[1 + (7 * i + n) % 31 for i in range(n)] for n in (5, 3, 9, 4, 12)]
    predicted = sum(map(len, documents)) - len(documents)
    single = model()
    for document in documents:
        logits = single(input_ids=torch.tensor([document])).logits[0, :-1]
        (F.cross_entropy(logits, torch.tensor(document[1:]), reduction="sum") / predicted).backward()
    rows = {name: torch.tensor(column) for name, column in pack({"input_ids": documents}, 16).items()}
    assert rows["input_ids"].shape == (3, 16)

    def rank() -> dict[str, torch.Tensor]:
        swapped = hf.swap(model())
        part = nxd.get_batch_on_this_context_parallel_rank(rows, balance="zigzag")
        swapped(**part, num_items_in_batch=nxd.global_num_items(part["labels"])).loss.backward()
        nxd.reduce_gradients(swapped)
        return hf.full_state_dict(swapped, gradients=True)

    for gradients in threads.run(mesh, rank):
        assert gradients.keys() >= {name for name, _ in single.named_parameters()}
        for name, param in single.named_parameters():
            assert distance(gradients[name], param.grad) < 1e-10, name


def test_rows_of_packed_documents_are_refused_by_flash_attention() -> None:
    """transformers looks for documents in batches of one row only, and passes no mask to flash attention."""
    rows = {name: torch.tensor(column) for name, column in pack({"input_ids": DOCUMENTS}, 8).items()}
    with comm.as_rank(nxd.Mesh(1), 0):
        model = hf.swap(LlamaForCausalLM(tiny_llama(num_hidden_layers=1, vocab_size=32)))
        model.config._attn_implementation = "flash_attention_2"
        with pytest.raises(ValueError, match="with flash_attention_2 got 3 rows of packed documents"):
            model(**rows)


def test_models_that_take_a_row_for_one_document_refuse_packed_rows() -> None:
    sizes = dict(hidden_size=16, num_hidden_layers=1, vocab_size=32)
    opt = dict(ffn_dim=16, num_attention_heads=2, max_position_embeddings=32, word_embed_proj_dim=16)
    rows = {name: torch.tensor(column) for name, column in pack({"input_ids": DOCUMENTS}, 8).items()}
    one = {**rows, "position_ids": torch.arange(8).expand(3, 8)}
    with comm.as_rank(nxd.Mesh(1), 0):
        for model, reason in (
            (OPTForCausalLM(OPTConfig(**sizes, **opt)), "makes masks without position_ids"),
            (MambaForCausalLM(MambaConfig(**sizes)), r"has layers that mix all tokens of a row \(linear_attention\)"),
        ):
            swapped = hf.swap(model)
            assert swapped(**one).loss.isfinite()
            with pytest.raises(ValueError, match=f"{reason}, and got rows of packed documents"):
                swapped(**rows)


@pytest.mark.slow
def test_packed_rows_go_into_transformers_trainer(tmp_path: Path) -> None:
    """The collator of Trainer takes them as they are; the loss is that of separate documents."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_llama(num_hidden_layers=1, vocab_size=32, use_cache=False))
    rows = datasets.Dataset.from_dict(pack({"input_ids": DOCUMENTS}, 8))
    batch = rows.with_format("torch")[:]
    with torch.no_grad():
        expected = float(model(**batch).loss)
        joined = float(model(input_ids=batch["input_ids"], labels=batch["labels"]).loss)
    options: Any = dict(
        max_steps=1, logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True
    )
    arguments = TrainingArguments(str(tmp_path), per_device_train_batch_size=len(rows), **options)
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(expected, rel=1e-4) != pytest.approx(joined, rel=1e-4)


def words_tokenizer() -> Any:
    """A tokenizer of a few words, with a chat template."""
    words = "<unk> <end> user assistant : hi there how are you fine".split()
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


def test_answers_alone_have_labels() -> None:
    tokenizer = words_tokenizer()

    def learned(example: dict[str, list[int]]) -> str:
        assert len(example["input_ids"]) == len(example["labels"])
        assert all(label in (-100, token) for token, label in zip(example["input_ids"], example["labels"]))
        return tokenizer.decode([label for label in example["labels"] if label != -100])

    turns = [("user", "hi there"), ("assistant", "hi you"), ("user", "how are you"), ("assistant", "fine")]
    messages = [{"role": role, "content": text} for role, text in turns]
    chat = encode_chat(messages, tokenizer)
    assert learned(chat) == "hi you <end> fine <end>" and len(chat["labels"]) == 18
    assert learned(encode_completion("how are you", "fine", tokenizer)) == "fine <end>"
    assert encode_completion("how", "fine <end>", tokenizer) == encode_completion("how", "fine", tokenizer)
    with pytest.raises(ValueError, match="one conversation, a list of messages, not a list of 2 lists"):
        encode_chat([messages, messages], tokenizer)
    with pytest.raises(ValueError, match=r"marks none of 4 tokens of a conversation of \[user\] as an"):
        encode_chat(messages[:1], tokenizer)


def test_special_tokens_of_a_prompt_stand_once() -> None:
    tokenizer = words_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "hi"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="hi $A", special_tokens=[("hi", 5)])
    assert tokenizer("there")["input_ids"] == [5, 6]
    expected = encode_completion("there", "fine", tokenizer)
    assert expected["input_ids"] == [5, 6, 10, 1] and expected["labels"] == [-100, -100, 10, 1]
    assert encode_completion("hi there", "fine", tokenizer) == expected


@pytest.mark.parametrize("form", ["json", "parquet", "disk"])
def test_files_are_read_by_datasets(form: str, tmp_path: Path) -> None:
    """The recipe of docs/data.md: files, packed on the way."""
    texts = datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    if form == "disk":
        texts.save_to_disk(tmp_path / "texts")
        data = datasets.load_from_disk(tmp_path / "texts")
    else:
        path = str(tmp_path / f"texts.{form}")
        texts.to_json(path) if form == "json" else texts.to_parquet(path)
        data = datasets.load_dataset(form, data_files=path, split="train", cache_dir=str(tmp_path / "cache"))
        streamed = datasets.load_dataset(form, data_files=path, split="train", streaming=True)
        rows = [*streamed.map(partial(pack, length=8), batched=True)]
        assert [row["input_ids"] for row in rows] == pack({"input_ids": DOCUMENTS}, 8)["input_ids"]
    assert data.map(partial(pack, length=8), batched=True)[:] == pack({"input_ids": DOCUMENTS}, 8)
