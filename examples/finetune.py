"""Fine-tune a language model of Hugging Face's transformers on text from a file.

    pip install transformers
    python examples/finetune.py
    python examples/finetune.py --model runs/finetune --text notes.txt --epochs 2
    python examples/finetune.py --model gpt2 --text notes.txt --length 512 --lr 5e-5

Batches are dictionaries, and the model returns an object with the loss: `prepare_batch`, `model_fn`, and a loss
function of one line translate. Without `--model`, nothing is downloaded: a tokenizer is trained on the text, and a
small GPT-2 is created from a configuration. Without `--text`, the text is from Python's own documentation. This takes
minutes on a CPU. After each epoch you see the perplexity of text that is not trained on: 1,000 at first, and below 100
after eight epochs, which is not enough for sentences that make sense. At the end, you see how the model continues one,
and model and tokenizer are saved as `from_pretrained` loads them.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import camshaft.distributed as idist
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import ProgressBar
from camshaft.utils import convert_tensor, manual_seed


def make_tokenizer_and_model(text: str, words: int = 1000) -> tuple[Any, Any]:
    """Train a tokenizer on the text, and create a GPT-2 of 0.5 million weights for it."""
    import transformers  # type: ignore[import-not-found, unused-ignore]
    from tokenizers import ByteLevelBPETokenizer  # type: ignore[import-not-found, unused-ignore]

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator([text], words, show_progress=False)
    shape = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 512, "bos_token_id": None, "eos_token_id": None}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=tokenizer.get_vocab_size(), **shape))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer), model


def prepare_batch(batch: Mapping[str, Tensor], device: torch.device, non_blocking: bool) -> tuple[Any, None]:
    """Return the arguments of the model; the labels are among them."""
    return convert_tensor(batch, device=device, non_blocking=non_blocking), None


def training(config: argparse.Namespace) -> list[float]:
    """Train; return the perplexity of held-out text, before the training and after each epoch."""
    import transformers  # type: ignore[import-not-found, unused-ignore]

    manual_seed(config.seed)
    text = config.text.read_text("utf-8") if config.text else "\n".join(topics.values())[:200_000]
    if config.model is None:
        tokenizer, network = make_tokenizer_and_model(text)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
        network = transformers.AutoModelForCausalLM.from_pretrained(config.model)
    ids = torch.tensor(tokenizer(text, truncation=False)["input_ids"])
    blocks = ids[: len(ids) // config.length * config.length].split(config.length)
    samples: Any = [{"input_ids": block, "labels": block} for block in blocks]  # the model shifts the labels
    count = len(samples) // 10
    loader = DataLoader(samples[count:], batch_size=config.batch_size, shuffle=True)
    validation_loader = DataLoader(samples[:count], batch_size=config.batch_size)

    device = idist.device()
    model = network.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    translate: dict[str, Any] = {
        "device": device,
        "prepare_batch": prepare_batch,
        "model_fn": lambda model, x: model(**x),
    }
    trainer = create_supervised_trainer(model, optimizer, lambda output, y: output.loss, **translate)
    evaluator = create_supervised_evaluator(model, output_transform=lambda x, y, output: output.loss, **translate)
    history: list[float] = []
    bar = ProgressBar()
    bar.attach(trainer, output_transform=lambda loss: {"loss": loss})

    @trainer.on(Events.STARTED | Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        evaluator.state.losses = []
        evaluator.run(validation_loader)
        history.append(torch.stack(evaluator.state.losses).mean().exp().item())
        bar.log_message(f"epoch {engine.state.epoch}: perplexity {history[-1]:.1f}")

    @evaluator.on(Events.ITERATION_COMPLETED)
    def collect(engine: Engine) -> None:
        engine.state.losses.append(engine.state.output)

    trainer.run(loader, max_epochs=config.epochs)

    start = tokenizer("The expression is evaluated", return_tensors="pt").to(device)
    written = model.eval().generate(**start, max_new_tokens=30, do_sample=True, top_k=20, pad_token_id=0)
    print(" ".join(tokenizer.decode(written[0]).split()))
    for one in (model, tokenizer):
        one.save_pretrained(config.output)
    print(f"saved {config.output}")
    return history


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a causal language model (default: a new one)")
    parser.add_argument("--text", type=Path, help="file to train on (default: Python's documentation)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the text (default: 8)")
    parser.add_argument("--batch_size", type=int, default=16, help="blocks of text in a step (default: 16)")
    parser.add_argument("--length", type=int, default=64, help="tokens in a block of text (default: 64)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate (default: 0.003)")
    parser.add_argument("--output", type=Path, default=Path("runs/finetune"), help="folder for model and tokenizer")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    training(parse())
