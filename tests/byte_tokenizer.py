"""A real tokenizer for tests, one token a byte, with special tokens and any chat template."""

from __future__ import annotations

from typing import Any

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer_with(template: str | None, *, adds_bos: bool = False) -> Any:
    """adds_bos: it begins every text with `<s>`, as Llama's does."""
    import tokenizers
    import transformers

    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[])
    )
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    if adds_bos:
        core.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made
