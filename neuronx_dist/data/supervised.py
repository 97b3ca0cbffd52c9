"""Labels of instruction data: the loss is that of answers, and prompts get the label -100.

Results are documents for `pack`, or for a collator that pads (`DataCollatorForSeq2Seq(tokenizer)`, whose padding of
labels is -100). Labels are those of transformers: equal to the tokens, and shifted by the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["encode_chat", "encode_completion"]

_IGNORED = -100


def encode_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Any, **template_options: Any) -> dict[str, list[int]]:
    """Tokenises a conversation by the tokenizer's chat template; labels are those of assistants' turns.

    Args:
        messages: `{"role": ..., "content": ...}` each.
        template_options: passed on to `tokenizer.apply_chat_template`, such as `tools`.

    Raises:
        ValueError: the template marks no token as an assistant's, or there are several conversations.
    """
    if not all(isinstance(message, Mapping) for message in messages):
        raise ValueError(f"encode_chat takes one conversation, a list of messages, not a list of {len(messages)} lists")
    options = dict(tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    encoded = tokenizer.apply_chat_template(list(messages), **options, **template_options)
    ids, mask = encoded["input_ids"], encoded["assistant_masks"]
    if not any(mask):
        roles = ", ".join(str(message["role"]) for message in messages)
        raise ValueError(
            f"the chat template of {type(tokenizer).__name__} marks none of {len(ids)} tokens of a conversation of "
            f"[{roles}] as an assistant's: put {{% generation %}} and {{% endgeneration %}} around the assistant's "
            "turns in tokenizer.chat_template, or use encode_completion"
        )
    return {"input_ids": list(ids), "labels": [token if is_answer else _IGNORED for token, is_answer in zip(ids, mask)]}


def encode_completion(prompt: str, completion: str, tokenizer: Any) -> dict[str, list[int]]:
    """Tokenises a prompt and its completion, which ends with the end-of-text token; labels are the completion's.

    The two are tokenised apart, as they are at generation: no token contains the end of the one and the begin of the
    other. The prompt begins with the special tokens that the tokenizer puts there; they stand once, also if the text of
    the prompt or of the completion contains them, as that of `apply_chat_template(tokenize=False)`.
    """
    before = tokenizer(prompt, add_special_tokens=True)["input_ids"]
    if tokenizer.bos_token_id is not None and before[:2] == [tokenizer.bos_token_id] * 2:
        before = before[1:]
    if before and before[-1] == tokenizer.eos_token_id:  # that of tokenizers which end every text
        before = before[:-1]
    after = tokenizer(completion, add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id is not None and after[-1:] != [tokenizer.eos_token_id]:
        after = [*after, tokenizer.eos_token_id]
    return {"input_ids": [*before, *after], "labels": [_IGNORED] * len(before) + list(after)}
