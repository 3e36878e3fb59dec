"""How long each stage takes: what a job costs before its first token, and its tokens at the rate."""

from __future__ import annotations

from draftsmith.config import Config
from draftsmith.estimate.model import Rows, Time
from draftsmith.estimate.rates import Rates
from draftsmith.evaluate_draft import in_flight

# The first load of a checkpoint of this size took 18 minutes (547 GB over a shared file system).
_LOAD_BYTES_PER_SECOND = 0.5e9
_START = 30.0
_TRAIN_START = 60.0


class Stages:
    """The stages of a run, timed by :attr:`rates`."""

    def __init__(
        self,
        config: Config,
        rows: Rows,
        rates: Rates,
        *,
        shards: int,
        world: int,
        training_tokens: int,
        weights: int,
        gpus: int,
    ) -> None:
        """``training_tokens`` are those of all passes, ``weights`` the target's bytes, ``gpus`` those that a job of the engine is
        given; ``world`` processes train, each on a GPU of its own where there are any.
        """
        self.config, self.rows, self.rates = config, rows, rates
        self.shards, self.world, self.training_tokens, self.gpus = shards, world, training_tokens, gpus
        self.load = _START + weights / _LOAD_BYTES_PER_SECOND

    def every(self) -> list[Time]:
        """In the order of the workflow."""
        rows, config = self.rows, self.config
        found = [self._constant("get_target")]
        if config.regenerate.enabled:
            # Servers have no shards.
            jobs = 1 if config.regenerate.endpoints else self.shards
            tokens = rows.answer_tokens or rows.supervised_tokens
            found.append(self._rated("regenerate", tokens, "tokens", jobs=jobs, loads=True))
            found.append(self._constant("merge_answers"))
        found.append(self._rated("tokenize", rows.tokens, "tokens", start=12.0))
        found += [self._constant(stage) for stage in ("preflight", "clean_gpus")]
        if config.preflight.dry_run or (config.preflight.dry_run is None and self.gpus):
            found.append(self._constant("dry_run", 120.0 if self.gpus else None))
        found.append(self._rated("extract_shard", rows.tokens, "tokens", jobs=self.shards, loads=True))
        found += [self._constant(stage) for stage in ("merge_manifest", "map_vocabulary")]
        found.append(self._rated("train_draft", self.training_tokens, "tokens", workers=self.world, start=_TRAIN_START))
        found += [self._constant("export_draft"), self._evaluation()]
        return found

    def _constant(self, stage: str, otherwise: float | None = None) -> Time:
        seconds = self.rates.fixed.get(stage, otherwise)
        source = self.rates.source.get(stage) or (
            "as assumed" if otherwise is not None else "unknown: name an earlier run by --measured"
        )
        formula = "-" if seconds is None else f"{seconds:,.0f} s, whatever the rows"
        gpu = None if seconds is None or stage not in ("preflight", "clean_gpus", "dry_run") else seconds * self.gpus
        return Time(
            stage=stage, fixed_seconds=seconds, seconds=seconds, gpu_seconds=gpu, source=source, formula=formula
        )

    def _rated(
        self,
        stage: str,
        work: int,
        unit: str,
        *,
        jobs: int = 1,
        workers: int = 1,
        start: float = 0.0,
        loads: bool = False,
    ) -> Time:
        rate, fixed = self.rates.rate.get(stage), self.rates.fixed.get(stage)
        how = ""
        if fixed is None:
            fixed = self.load if loads else start
            how = " (a start and the weights at 0.5 GB/s, as assumed)" if loads else " (as assumed)"
        time = Time(
            stage=stage, jobs=jobs, work=work, unit=unit, rate=rate, fixed_seconds=fixed,
            source=self.rates.source.get(stage, f"unknown: give --rate {_SHORT.get(stage, stage)}=NUMBER, or --measured results/NAME"),
            formula="-",
        )  # fmt: skip
        if rate is not None:
            side_by_side = jobs * workers
            time.seconds = fixed + work / (rate * side_by_side)
            gpus = self.world if stage == "train_draft" and self.gpus else self.gpus
            time.gpu_seconds = None if stage == "tokenize" else time.seconds * jobs * gpus
            divided = f" / {side_by_side} {'shards' if jobs > 1 else 'processes'}" if side_by_side > 1 else ""
            time.formula = f"{fixed:,.0f} s{how} + {work:,} {unit} / {rate:,.0f} a second{divided}"
        return time

    def _evaluation(self) -> Time:
        settings, rates = self.config.evaluate, self.rates
        answer = min(rates.facts.get("answer_tokens", settings.max_tokens), settings.max_tokens)
        temperatures = len({settings.temperature, *settings.temperatures})
        lengths = len({settings.k, *settings.ks})
        work = round(self.rows.prompts * answer) * temperatures
        plain = rates.rate.get("evaluate")
        # Without a figure of its own the draft is taken to save nothing.
        draft = rates.rate.get("evaluate_draft", plain)
        servings = 1 + lengths + settings.untrained
        start, how = rates.facts.get("serving_start"), ""
        if start is None:
            start, how = rates.facts.get("load") or self.load, ", as assumed"
        time = Time(
            stage="evaluate_draft", work=work * lengths, unit="tokens", rate=draft, fixed_seconds=servings * start,
            source=rates.source.get("evaluate_draft", "unknown: give --rate evaluate=NUMBER and --rate evaluate_draft=NUMBER, or --measured results/NAME"),
            formula="-",
        )  # fmt: skip
        if plain is not None and draft is not None:
            loaded = [(number, in_flight.tokens(number, answer)) for number in sorted(set(settings.concurrency))]
            # Fewer requests than the rates were measured with: a step of the engine takes as long and gives that much less.
            most = rates.facts.get("requests_at_once") or min(
                self.config.tokenize.evaluation_per_domain or 1, self.config.engine.max_num_seqs
            )
            load = sum(tokens * max(1.0, most / number) * (1 / plain + 1 / draft) for number, tokens in loaded)
            time.seconds = servings * start + work / plain + lengths * work / draft + load
            time.gpu_seconds = time.seconds * self.gpus
            at = f" x {temperatures} temperatures" if temperatures > 1 else ""
            of = f" x {lengths} draft lengths" if lengths > 1 else ""
            flights = (
                f" + {load:,.0f} s with {', '.join(str(number) for number, _ in loaded)} in flight" if loaded else ""
            )
            time.formula = (
                f"{servings * start:,.0f} s ({servings} servings are started{how}) + {self.rows.prompts} prompts x {answer:,.0f} tokens{at}"
                f" / {plain:,.0f} a second, and / {draft:,.0f} with the draft{of}{flights}"
            )
        return time


_SHORT = {"extract_shard": "extract", "train_draft": "train"}
