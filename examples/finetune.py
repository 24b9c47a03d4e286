"""Fine-tune a model of Hugging Face's transformers to classify sentences: which library do they document?

    pip install transformers
    python examples/finetune.py
    python examples/finetune.py --model distilbert-base-uncased --lr 5e-5 --epochs 2
    python examples/finetune.py --model runs/finetune --sentences sentences.tsv

Batches are dictionaries, and the model returns an object with loss and logits: `prepare_batch`, `model_fn`, and a loss
function of one line translate. You see a progress bar, the accuracy on sentences that are not trained on after each
epoch, and at the end what the model says about three new sentences. Model and tokenizer are saved as `from_pretrained`
loads them. Without `--model`, nothing is downloaded, and a CPU needs less than a minute: a tokenizer is trained on the
sentences, and a small BERT is created from a configuration. The sentences are from the docstrings of Python, NumPy, and
PyTorch, unless `--sentences` names a file with a label, a tab, and a sentence on each line.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import camshaft.distributed as idist
from camshaft.engine import Engine, Events, create_supervised_evaluator, create_supervised_trainer
from camshaft.handlers import ProgressBar
from camshaft.utils import convert_tensor, manual_seed

MODULES = {
    "Python": "argparse asyncio builtins collections datetime inspect json logging os random re threading zipfile",
    "NumPy": "numpy numpy.char numpy.fft numpy.linalg numpy.ma numpy.random",
    "PyTorch": "torch torch.autograd torch.distributions torch.linalg torch.nn torch.nn.functional torch.optim",
}
NEW = (
    "Return the list of all files in the given directory.",
    "Compute the mean of the array elements along the given axis.",
    "Applies dropout to the input tensor during training.",
)


def read_docstrings() -> list[tuple[str, str]]:
    """Return labels and sentences: the first of each paragraph of the docstrings of functions, classes, and methods."""
    labels: dict[str, str] = {}
    for label, modules in MODULES.items():
        for module in map(importlib.import_module, modules.split()):
            members = [value for name, value in vars(module).items() if callable(value) and name[0] != "_"]
            methods = [value for kind in filter(inspect.isclass, members) for value in vars(kind).values()]
            for one in filter(callable, (*members, *methods)):
                for paragraph in (inspect.getdoc(one) or "").split("\n\n")[:3]:
                    sentence = " ".join(paragraph.partition(". ")[0].split()).rstrip(".") + "."
                    if re.match(r"[A-Z](\S+ ){4,25}\S+$", sentence) and "---" not in sentence:
                        labels.setdefault(sentence, label)
    return [(label, sentence) for sentence, label in labels.items()]


def make_tokenizer_and_model(sentences: list[str], labels: list[str]) -> tuple[Any, Any]:
    """Train a tokenizer on the sentences, and create a BERT of 0.4 million weights for it."""
    import transformers  # type: ignore[import-not-found, unused-ignore]
    from tokenizers import BertWordPieceTokenizer  # type: ignore[import-not-found, unused-ignore]

    words = BertWordPieceTokenizer()
    words.train_from_iterator(sentences, 4000, show_progress=False)
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, **special)
    shape = {"hidden_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 192}
    config = transformers.BertConfig(vocab_size=len(tokenizer), id2label=dict(enumerate(labels)), **shape)
    return tokenizer, transformers.BertForSequenceClassification(config)


def prepare_batch(batch: Mapping[str, Any], device: torch.device, non_blocking: bool) -> tuple[Any, Tensor]:
    """Return the arguments of the model, with the labels among them, and the labels."""
    batch = convert_tensor(dict(batch), device=device, non_blocking=non_blocking)
    return batch, batch["labels"]


def training(config: argparse.Namespace) -> list[float]:
    """Train; return the accuracy on held-out sentences after each epoch."""
    import transformers  # type: ignore[import-not-found, unused-ignore]
    from torchmetrics.classification import MulticlassAccuracy

    manual_seed(config.seed)
    lines = config.sentences.read_text("utf-8").splitlines() if config.sentences else []
    samples = [tuple(line.split("\t", 1)) for line in lines] or read_docstrings()
    random.Random(config.seed).shuffle(samples)
    labels = sorted({label for label, _ in samples})
    if config.model is None:
        tokenizer, network = make_tokenizer_and_model([sentence for _, sentence in samples], labels)
    else:
        tokenizer = transformers.AutoTokenizer.from_pretrained(config.model)
        kind, names = transformers.AutoModelForSequenceClassification, dict(enumerate(labels))
        network = kind.from_pretrained(config.model, id2label=names, num_labels=len(labels))

    def collate(batch: list[tuple[str, str]]) -> dict[str, Tensor]:
        tokens = tokenizer([sentence for _, sentence in batch], padding=True, return_tensors="pt")
        return {**tokens, "labels": torch.tensor([labels.index(label) for label, _ in batch])}

    count, data = len(samples) // 10, {"batch_size": config.batch_size, "collate_fn": collate}
    loader = idist.auto_dataloader(samples[count:], shuffle=True, seed=config.seed, **data)
    validation_loader: Any = DataLoader(samples[:count], **data)  # type: ignore[arg-type]

    device, model = idist.device(), network.to(idist.device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    translate: Any = {"device": device, "prepare_batch": prepare_batch, "model_fn": lambda model, x: model(**x)}
    trainer = create_supervised_trainer(model, optimizer, lambda output, y: output.loss, **translate)
    metrics = {"accuracy": MulticlassAccuracy(len(labels), average="micro", validate_args=False)}
    evaluator = create_supervised_evaluator(
        model, metrics, output_transform=lambda x, y, output: (output.logits, y), **translate
    )
    bar, history = ProgressBar(), list[float]()
    bar.attach(trainer, output_transform=lambda loss: {"loss": loss})

    @trainer.on(Events.EPOCH_COMPLETED)
    def evaluate(engine: Engine) -> None:
        history.append(float(evaluator.run(validation_loader).metrics["accuracy"]))
        bar.log_message(f"epoch {engine.state.epoch}: accuracy {history[-1]:.1%} on {count} new sentences")

    bar.log_message(f"{len(samples)} sentences of {', '.join(labels)}")
    trainer.run(loader, max_epochs=config.epochs)

    tokens = tokenizer(list(NEW), padding=True, return_tensors="pt").to(device)
    scores = model.eval()(**tokens).logits.softmax(dim=1)
    for sentence, score, label in zip(NEW, *scores.max(dim=1), strict=True):
        print(f"{labels[label]:>8} {score:4.0%}  {sentence}")
    transformers.utils.logging.disable_progress_bar()
    network.save_pretrained(config.output), tokenizer.save_pretrained(config.output)
    print(f"saved {config.output}")
    return history


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a model that reads sentences (default: a new one)")
    parser.add_argument("--sentences", type=Path, help="file to train on (default: docstrings)")
    parser.add_argument("--epochs", type=int, default=4, help="passes over the sentences (default: 4)")
    parser.add_argument("--batch_size", type=int, default=32, help="sentences in a step (default: 32)")
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate (default: 0.002)")
    parser.add_argument("--output", type=Path, default=Path("runs/finetune"), help="folder for model and tokenizer")
    parser.add_argument("--seed", type=int, default=17)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    training(parse())
