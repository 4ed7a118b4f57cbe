"""Load a transformers model, or a peft adapter, with its tokenizer from a folder written by `save_pretrained`.

Nothing is downloaded, no code in the folder is run, and only safetensors are read unless more is asked for.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

from torch import nn

from likewise.loading.imports import library
from likewise.loading.paths import existing, listed
from likewise.loading.texts import TASKS, Task, Tokenization

CONFIG, ADAPTER = "config.json", "adapter_config.json"
USUAL_LENGTH = 1024  # tokens of a text, where the model reads more
CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "sequence-classification": "AutoModelForSequenceClassification",
}
ADAPTER_TASKS: dict[str, Task] = {"CAUSAL_LM": "causal-lm", "SEQ_CLS": "sequence-classification"}


def is_pretrained(text: str) -> bool:
    """Whether a word names a folder with a transformers model or a peft adapter."""
    path = Path(text).expanduser()
    return path.is_dir() and any((path / name).is_file() for name in (CONFIG, ADAPTER))


class PretrainedFolder:
    """A transformers model or a peft adapter, and its tokenizer, in local folders.

    Args:
        text: The folder.
        task: What the model does; None: what its configuration says.
        base_model: Of an adapter, the folder of the model that it adapts; None: where its configuration says.
        allow_pickle: Also read weights in files of torch.save (tensors only), where there are no safetensors.

    """

    def __init__(
        self, text: str, *, task: str | None = None, base_model: str | None = None, allow_pickle: bool = False
    ) -> None:
        self._folder = existing(text)
        self._adapter = (self._folder / ADAPTER).is_file()
        if base_model is not None and not self._adapter:
            raise ValueError(f"{text} is not a peft adapter (it has no {ADAPTER}): leave out --base-model.")
        self._allow_pickle = allow_pickle
        self._base = self._find_base(base_model) if self._adapter else self._folder
        self._config = library("transformers", "transformers").AutoConfig.from_pretrained(
            self._base, local_files_only=True
        )
        self.task = _check_task(task) if task is not None else self._find_task()

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The class names in a classifier's configuration; None if it has only default names."""
        if self.task != "sequence-classification":
            return None
        named = [str(self._config.id2label[i]) for i in range(self._config.num_labels)]
        return None if named == [f"LABEL_{i}" for i in range(len(named))] else tuple(named)

    def load_model(self) -> nn.Module:
        """Return the model with its weights, in evaluation mode; with an adapter, only its parameters require grad."""
        _refuse_pickle(self._base, self._allow_pickle)
        loader = getattr(library("transformers", "transformers"), CLASSES[self.task])
        safe = None if self._allow_pickle else True
        with _without_progress_bars():
            model = loader.from_pretrained(
                self._base, config=self._config, local_files_only=True, use_safetensors=safe
            )
        if self.task == "sequence-classification" and model.config.pad_token_id is None:
            model.config.pad_token_id = self._load_tokenizer().pad_token_id
        if self._adapter:
            _refuse_pickle(self._folder, self._allow_pickle)
            peft = library("peft", "peft")
            model = peft.PeftModel.from_pretrained(
                model, self._folder, is_trainable=True, local_files_only=True
            )
        return model.eval()

    def tokenization(self, max_length: int | None = None) -> Tokenization:
        """Return how texts become the model's inputs.

        Args:
            max_length: Tokens that are kept of a text; None: what the model reads, at most 1,024.

        """
        tokenizer = self._load_tokenizer()
        pad_id = tokenizer.pad_token_id
        if pad_id is None and self.task == "sequence-classification":
            raise ValueError(
                f"The tokenizer in {self._folder} has no pad token, which a classifier needs to find the end of a "
                "text: set tokenizer.pad_token, and save it again."
            )
        if pad_id is None:  # any token does: the attention mask leaves it out
            pad_id = tokenizer.eos_token_id or 0
        limit = self._longest(tokenizer)
        if max_length is not None and limit is not None and max_length > limit:
            raise ValueError(
                f"max_length is {max_length:,}, but the model in {self._base} reads {limit:,} tokens: pass fewer."
            )
        length = max_length or min(limit or USUAL_LENGTH, USUAL_LENGTH)
        return Tokenization(tokenizer, self.task, length, int(pad_id))

    def _longest(self, tokenizer: Any) -> int | None:
        """Return how many tokens the model reads at most, as far as it is known."""
        known = [getattr(self._config, name, None) for name in ("max_position_embeddings", "n_positions")]
        limits = [int(value) for value in known if isinstance(value, int) and value > 0]
        if limits and "roberta" in self._config.model_type:  # positions begin after that of padding
            limits = [limit - int(self._config.pad_token_id or 0) - 1 for limit in limits]
        if tokenizer.model_max_length < 10**9:  # else it says that it knows none
            limits.append(int(tokenizer.model_max_length))
        return min(limits) if limits else None

    def _load_tokenizer(self) -> Any:
        tokenizers = library("transformers", "transformers").AutoTokenizer
        own = any(self._folder.glob("tokenizer*"))
        folder = self._folder if own else self._base
        if not any((*folder.glob("tokenizer*"), *folder.glob("vocab*"), *folder.glob("*.model"))):
            raise ValueError(
                f"{folder} has no tokenizer: write it there with tokenizer.save_pretrained({str(folder)!r}), or pass "
                "--prepare."
            )
        return tokenizers.from_pretrained(folder, local_files_only=True)

    def _find_task(self) -> Task:
        if self._adapter:
            said = _read_json(self._folder / ADAPTER).get("task_type")
            if said in ADAPTER_TASKS:
                return ADAPTER_TASKS[said]
        for name in self._config.architectures or ():
            if name.endswith("ForSequenceClassification"):
                return "sequence-classification"
            if name.endswith(("ForCausalLM", "LMHeadModel")):
                return "causal-lm"
        raise ValueError(
            f"{self._folder} does not say what its model does (architectures: "
            f"{listed(self._config.architectures or ())}): pass --task {' or --task '.join(TASKS)}."
        )

    def _find_base(self, given: str | None) -> Path:
        """Return the folder of an adapter's base model; its name is never looked up on a hub."""
        if given is not None:
            return existing(given)
        name = str(_read_json(self._folder / ADAPTER).get("base_model_name_or_path"))
        for path in (Path(name).expanduser(), self._folder / name):
            if (path / CONFIG).is_file():
                return path
        raise ValueError(
            f"The adapter in {self._folder} is for the model {name!r}, which is not a local folder, and nothing is "
            "downloaded: pass --base-model FOLDER."
        )


def _check_task(task: str) -> Task:
    for known in get_args(Task):
        if task == known:
            return known
    raise ValueError(f"There is no task {task!r}: pass --task {' or --task '.join(TASKS)}.")


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Turn off the progress bars of transformers: the command says what it loads."""
    logging = library("transformers.utils.logging", "transformers")
    were_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_enabled:
            logging.enable_progress_bar()


def _refuse_pickle(folder: Path, allow_pickle: bool) -> None:
    """Raise if a folder has weights, and none of them are safetensors."""
    names = [entry.name for entry in sorted(folder.iterdir())]
    if allow_pickle or any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names):
        return
    raise ValueError(
        f"{folder} holds no .safetensors, only {listed(names)}: write them with model.save_pretrained(folder), or read "
        "these files with --allow-pickle (tensors only)."
    )


def _read_json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object.")
    return found
