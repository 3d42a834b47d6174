"""Builds the embedded model from nothing: its tokenizer, a supervised run on two styles of answering, its measures.

`python -m slmgrpo.tiny.build [--out DIR]`. Two answers in three are guesses, one is worked out, so that the model
at temperature 1 guesses two times in three and GRPO can find that thinking pays.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import random
import string
import time
from pathlib import Path
from typing import Any

from slmgrpo import tiny
from slmgrpo.tiny import tasks

log = logging.getLogger(__name__)

SEED = 7
STEPS = 1500
SAMPLES_PER_STEP = 96
LEARNING_RATE = 6e-3
WORKED_EARLY, WORKED = 0.9, 1 / 3
"""Share of worked samples in the first two thirds of the steps, which teach the steps of thought, and in the last."""
SPECIAL = ("<|pad|>", "<|begin|>", "<|end|>", "<|unknown|>", "<|system|>", "<|user|>", "<|assistant|>")
PIECES = (
    "<think>", "</think>", "\\boxed{", "```python\n", "\n```", "def f(x): return ",
    "What is the last digit of ", "What is ", "Write f(x):", "\nA) ", "\nB) ", "\nC) ", "\nD) ", "\nf(",
)  # fmt: skip
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def tokenizer() -> Any:
    """One token per printable ASCII character, and one for each piece that the tasks use often."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *PIECES, "\n", *(c for c in string.printable if c.isprintable())]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|unknown|>"))
    escaped = "|".join("".join(f"\\{c}" if c in r"\()[]{}|+*?.^$" else c for c in piece) for piece in PIECES)
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(f"{escaped}|[\\s\\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<|pad|>",
        bos_token="<|begin|>",
        eos_token="<|end|>",
        unk_token="<|unknown|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        clean_up_tokenization_spaces=False,
    )


def blank_model(words: Any) -> Any:
    """A Llama of 0.87 million parameters with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.04,
        pad_token_id=words.pad_token_id,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
    )
    return LlamaForCausalLM(config)


def teach(model: Any, words: Any, *, seed: int, steps: int) -> None:
    """Supervised steps on completions only, a third of the samples from each task."""
    import torch

    rng = random.Random(seed)
    pools = [[(row, prompt_ids(words, row)) for row in tasks.rows(task, "train")] for task in tasks.TASKS]
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    rest = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    optimizers = [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    model.train()
    started = time.monotonic()
    for step in range(steps):
        rate = LEARNING_RATE * min(1.0, (step + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * step / steps)) / 2)
        share = WORKED_EARLY if step < steps * 2 / 3 else WORKED
        batches = [samples_batch(pool, words, rng, SAMPLES_PER_STEP // len(pools), worked=share) for pool in pools]
        tokens = sum(int((labels != -100).sum()) for _, labels in batches)
        total = 0.0
        for ids, labels in batches:
            logits = model(input_ids=ids).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(
                logits.reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1), reduction="sum"
            )
            (loss / tokens).backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0:
            log.info("step %d: loss %.4f, %.0f s", step + 1, total / tokens, time.monotonic() - started)
    model.eval()


def prompt_ids(words: Any, row: tasks.Row) -> list[int]:
    messages = [{"role": "user", "content": row["question"]}]
    return words.encode(words.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def samples_batch(pool: list[Any], words: Any, rng: random.Random, size: int, *, worked: float) -> tuple[Any, Any]:
    """Token ids and labels of random samples, padded on the right (causal attention never looks there)."""
    import torch

    samples = []
    for row, prompt in rng.choices(pool, k=size):
        text = tasks.worked(row) if rng.random() < worked else tasks.guess(row, rng)
        samples.append((prompt, [*words.encode(text), words.eos_token_id]))
    width = max(len(prompt) + len(completion) for prompt, completion in samples)
    ids = torch.full((size, width), words.pad_token_id)
    labels = torch.full((size, width), -100)
    for i, (prompt, completion) in enumerate(samples):
        end = len(prompt) + len(completion)
        ids[i, :end] = torch.tensor(prompt + completion)
        labels[i, len(prompt) : end] = torch.tensor(completion)
    return ids, labels


def measure(model: Any, words: Any, *, seed: int, questions: int = 400, samples: int = 8) -> dict[str, Any]:
    """Held-out accuracy per task: one greedy answer, answers at temperature 1, any of `samples`, always thinking."""
    result = {}
    for task in tasks.TASKS:
        held_out = tasks.rows(task, "test", questions)
        greedy = complete(model, words, held_out, seed=seed)
        drawn = [complete(model, words, held_out, seed=seed + i, greedy=False) for i in range(samples)]
        thinking = complete(model, words, held_out, seed=seed, prefill="<think>")
        right = [[is_right(row, text) for row, text in zip(held_out, texts, strict=True)] for texts in drawn]
        texts = [text for texts in drawn for text in texts]
        result[f"tiny:{task}"] = {
            "greedy": _share([is_right(row, text) for row, text in zip(held_out, greedy, strict=True)]),
            "temperature_1": _share([verdict for verdicts in right for verdict in verdicts]),
            f"pass@{samples}": _share([any(verdicts) for verdicts in zip(*right, strict=True)]),
            "always_thinking": _share([is_right(row, text) for row, text in zip(held_out, thinking, strict=True)]),
            "thinks": _share([text.startswith("<think>") for text in texts]),
            "tokens": round(sum(len(words.encode(text)) + 1 for text in texts) / len(texts), 1),
        }
    return result


def complete(
    model: Any, words: Any, questions: list[tasks.Row], *, seed: int, greedy: bool = True, prefill: str = ""
) -> list[str]:
    """One completion per row."""
    import torch

    prompts = [prompt_ids(words, row) + words.encode(prefill) for row in questions]
    batch = words.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    torch.manual_seed(seed)
    with torch.inference_mode():
        written = model.generate(**batch, do_sample=not greedy, max_new_tokens=32)
    texts = words.batch_decode(written[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return [prefill + text for text in texts]


def is_right(row: tasks.Row, completion: str) -> bool:
    """Compares the end of a completion as text: other spellings of the same function count as wrong."""
    return completion.endswith(tasks.answered(row["task"], row["answer"]))


def checksum(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def sources() -> tuple[Path, Path]:
    """The files that decide what the weights become."""
    return Path(__file__), Path(tasks.__file__)


def build(out: Path, *, seed: int, steps: int) -> dict[str, Any]:
    """Trains, saves and measures; returns what build.json holds."""
    import torch
    from transformers import GenerationConfig

    torch.manual_seed(seed)
    started = time.monotonic()
    words = tokenizer()
    model = blank_model(words)
    teach(model, words, seed=seed, steps=steps)
    seconds = time.monotonic() - started
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    model.save_pretrained(out)
    words.save_pretrained(out)
    record = {
        "seed": seed,
        "steps": steps,
        "samples_per_step": SAMPLES_PER_STEP,
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_s": round(seconds),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "accuracy": measure(model, words, seed=seed),
        "sources_sha256": checksum(*sources()),
        "weights_sha256": checksum(out / "model.safetensors"),
    }
    (out / "build.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def _share(verdicts: list[bool]) -> float:
    return round(sum(verdicts) / len(verdicts), 3)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=tiny.path(), help="folder to write (default: the package's)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    record = build(arguments.out, seed=arguments.seed, steps=arguments.steps)
    log.info("%s", json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
