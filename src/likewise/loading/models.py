"""Models from files: weights for a model, or a transformers model or peft adapter with its tokenizer.

A weights file is read without running code in it. Of a folder written by `save_pretrained` nothing is downloaded, no
code in it is run, and only safetensors are read unless more is asked for.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, get_args
from zipfile import BadZipFile, ZipFile, is_zipfile

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from likewise.loading.imports import library
from likewise.loading.paths import existing, listed
from likewise.loading.texts import TASKS, Task, Tokenization

State = dict[str, Any]  # tensors by name; modules may add an `_extra_state` of their own
HOLDERS = ("state_dict", "model_state_dict", "model")
PREFIXES = ("module.", "_orig_mod.", "model.")  # of DataParallel, torch.compile and Lightning


def load_weights(model: nn.Module, text: str) -> None:
    """Load the state in a file into a model; names and shapes must match.

    Wrappers' prefixes are taken off where the rest then fits; tensors that are one in the model need to be
    there once.
    """
    path = existing(text)
    wanted = model.state_dict()
    state = _with_ties(_fitting(_state(_content(path), path), wanted), wanted)
    problems = _mismatches(state, wanted)
    if problems:
        raise ValueError(f"{path} does not fit {type(model).__name__}: {'; '.join(problems)}.")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit {type(model).__name__}: {error}") from error


def load_tensors(text: str) -> object:
    """Return the content of a .safetensors file, or one written by torch.save, without running code in it.

    Args:
        text: The path of the file.

    Raises:
        ValueError: It holds more than tensors, numbers and text, or cannot be read.

    """
    return _content(existing(text))


def _content(path: Path) -> object:
    if path.is_dir():
        names = [entry.name for entry in sorted(path.iterdir())]
        raise ValueError(f"{path} is a folder: name the weights file in it, one of {listed(names)}.")
    if path.suffix.lower() == ".safetensors":
        files = library("safetensors.torch", "safetensors")
        try:
            return files.load_file(path)
        except Exception as error:
            raise ValueError(f"{path} cannot be read as safetensors ({error}).") from error
    _refuse_compressed(path)
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except UnpicklingError as error:
        raise ValueError(
            f"{path} holds more than tensors, or is not a weights file: reading it would run code in it (pickle), "
            "which is refused. If you trust it, load it yourself once, and write its state: "
            "torch.save(model.state_dict(), 'weights.pt')."
        ) from error
    except Exception as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise ValueError(
            f"{path} cannot be read as weights ({reason}): expected .safetensors, or a file written by "
            "torch.save(model.state_dict(), path)."
        ) from error


def _refuse_compressed(path: Path) -> None:
    """Raise an error if a file of torch.save expands to more than its size: torch.save compresses nothing."""
    if not is_zipfile(path):
        return
    try:
        with ZipFile(path) as archive:
            needed = sum(member.file_size for member in archive.infolist())
    except BadZipFile as error:
        raise ValueError(f"{path} cannot be read as weights ({error}).") from error
    if needed > path.stat().st_size:
        raise ValueError(
            f"{path} expands to {needed:,} bytes, more than the {path.stat().st_size:,} of the file: "
            "torch.save compresses nothing, so it did not write this file."
        )


def _state(content: object, path: Path) -> State:
    held = content
    if isinstance(content, Mapping):
        held = next((content[k] for k in HOLDERS if isinstance(content.get(k), Mapping)), content)
    if not isinstance(held, Mapping):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected a state dict: tensors by name.")
    odd = [
        str(k) for k, v in held.items() if not isinstance(v, Tensor) and not f"{k}".endswith("_extra_state")
    ]
    if odd or not held:
        raise ValueError(
            f"{path} holds no state dict, neither itself nor under {', '.join(HOLDERS)}: it has "
            f"{listed(map(str, held))}. Not tensors: {listed(odd, 3)}."
        )
    return {str(name): value for name, value in held.items()}


def _fitting(state: State, wanted: State) -> State:
    """Return the state with the prefix removed whose names fit the model best; unchanged if it fits."""
    return min(_strip_prefixes(state), key=lambda names: len(names.keys() ^ wanted.keys()))


def _strip_prefixes(state: State) -> Iterator[State]:
    """Yield the state, then the state without each prefix that all its names share."""
    yield state
    for prefix in PREFIXES:
        if all(name.startswith(prefix) for name in state):
            yield from _strip_prefixes({name.removeprefix(prefix): value for name, value in state.items()})


def _with_ties(state: State, wanted: State) -> State:
    """Return the state with the aliases of shared tensors that safetensors leaves out."""
    there = {_memory(wanted[name]): value for name, value in state.items() if _memory(wanted.get(name))}
    tied = {name: there[_memory(value)] for name, value in wanted.items() if _memory(value) in there}
    return {**tied, **state}


def _memory(value: object) -> tuple[int, ...] | None:
    """Return the storage that two names of one tensor share; None if there is none."""
    if not isinstance(value, Tensor) or is_lazy(value) or value.device.type == "meta" or not value.numel():
        return None
    return value.data_ptr(), *value.shape, *value.stride()


def _mismatches(state: State, wanted: State) -> list[str]:
    missing, unexpected = sorted(wanted.keys() - state.keys()), sorted(state.keys() - wanted.keys())
    both = [name for name in wanted if name in state and isinstance(wanted[name], Tensor)]
    shapes = {name: (state[name], wanted[name]) for name in both if not is_lazy(wanted[name])}
    differing = [
        f"{name} is {tuple(given.shape)} there and {tuple(own.shape)} in the model"
        for name, (given, own) in shapes.items()
        if given.shape != own.shape
    ]
    return [
        *([f"missing in the file: {listed(missing, 6)}"] if missing else []),
        *([f"not in the model: {listed(unexpected, 6)}"] if unexpected else []),
        *([f"shapes that differ: {listed(differing, 3)}"] if differing else []),
    ]


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
