"""vLLM's processes, and the policy in them: started, checked, changed in place, watched and ended.

Both users of vLLM stand on this: `node.engines.vllm` draws completions, `node.engines.vllm_prefill` measures other
people's. It drives `AsyncLLM` from the caller's event loop; `node.engines.vllm_worker` is what runs beside the
model. A policy comes from the run and from nowhere else: vLLM is given a folder with a configuration that
`node.policy` checked, and is told that it is offline.

The V1 model runner is pinned: the second one hands out hidden states in another place, and is the default only
where a GPU is (docs/adr/0010-vllm.md).
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from node.engines import vllm_processes
from node.engines.base import BrokenPolicy, EngineDied, EngineError, NoPolicy
from node.engines.vllm_settings import VllmSettings, make_plan
from node.policy import Blueprint, inspect_policy
from node.protocol.run import RunSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

RPC_SECONDS = 600.0
END_SECONDS = 30.0
WATCH_SECONDS = 1.0
WEIGHTS = "model.safetensors"


class VllmHost:
    """One AsyncLLM and the policy that it holds. `state` is a folder of its own, for what vLLM reads policies from.

    `busy` says whether tokens are due; `on_end` is told why the engine ended, once, whatever the reason.
    """

    def __init__(
        self,
        spec: RunSpec,
        settings: VllmSettings,
        *,
        state: Path,
        busy: Callable[[], bool],
        on_end: Callable[[EngineDied], None],
        prefix_caching: bool = True,
    ) -> None:
        self.llm: Any = None
        self._spec = spec
        self._settings = settings
        self._state = state
        self._busy = busy
        self._on_end = on_end
        self._prefix_caching = prefix_caching
        self._loaded: tuple[Blueprint, int] | None = None
        self._loading = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None
        self._progress = time.monotonic()
        self._is_tainted = False
        self._gone = asyncio.Event()
        self._launch: vllm_processes.Launch | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def version(self) -> int | None:
        """The version of the policy in place, None while there is none."""
        return self._loaded[1] if self._loaded else None

    @property
    def policy(self) -> Blueprint:
        """The policy in place; raises NoPolicy."""
        if self._loaded is None:
            raise NoPolicy("no policy was loaded yet")
        return self._loaded[0]

    def taint(self) -> None:
        """The policy in place made numbers that are not finite: the next one gets an engine of its own.

        A cache that holds them spoils what is read beside them, masked or not.
        """
        self._is_tainted = True

    def progressed(self) -> None:
        """Something came out of the engine, or was asked of it after a rest."""
        self._progress = time.monotonic()

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Have each of vLLM's worker processes call `method`; their answers by rank."""
        if self.llm is None:
            raise EngineDied("vLLM does not run")
        answers: list[Any] = await self._while_alive(
            self.llm.collective_rpc(method, timeout=RPC_SECONDS, args=arguments)
        )
        return answers

    async def _while_alive(self, asked: Coroutine[Any, Any, T]) -> T:
        """What vLLM answers; raises EngineDied where its processes end first, for which vLLM would wait for ever."""
        task, gone = asyncio.create_task(asked), asyncio.create_task(self._gone.wait())
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineDied("vLLM's engine process ended, its log above says why")
            return task.result()
        finally:
            task.cancel()
            gone.cancel()

    # -- policies

    async def load(self, path: Path, *, version: int) -> None:
        """Put the policy in `path` in place, as `Engine.load` says; starts vLLM where it does not run.

        Raises PolicyError and DoesNotFit with nothing changed, and EngineDied with nothing running any more.
        """
        async with self._loading:
            folder = await asyncio.to_thread(self._hold, path, version)
            try:
                self._loaded = await self._put_in_place(folder, version), version
            except BaseException:
                # Of whatever kind: its file would fill the disk, however often its owner deletes it.
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                raise
            await asyncio.to_thread(self._keep_only, folder)

    async def _put_in_place(self, folder: Path, version: int) -> Blueprint:
        blueprint = await asyncio.to_thread(inspect_policy, folder / WEIGHTS)
        if blueprint.hidden < self._spec.proofs.min_hidden:
            raise BrokenPolicy(f"{blueprint.hidden} hidden units are too few for the run's proofs")
        await asyncio.to_thread(self._lay_out, folder, blueprint)
        if self.llm is not None and self._loaded is not None and self._may_hold(blueprint):
            await self._reload(folder, version)
        else:
            await self._start(folder, blueprint, version)
        return blueprint

    def _hold(self, path: Path, version: int) -> Path:
        """A folder of our own with the policy file under the name that vLLM expects, whatever becomes of `path`."""
        folder = self._state / f"policy-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # Whoever brings policies deletes old ones, perhaps between our look at one and vLLM's reading of it.
        hold(path, folder / WEIGHTS)
        return folder

    def _may_hold(self, blueprint: Blueprint) -> bool:
        """Whether the engine as it is can take these weights."""
        return not self._is_tainted and _same(self.policy, blueprint)

    def _lay_out(self, folder: Path, blueprint: Blueprint) -> None:
        """Add our checked configuration."""
        config = blueprint.config.to_dict() | {
            "architectures": [_architecture(blueprint)],
            "dtype": self._spec.model.dtype,
        }
        (folder / "config.json").write_text(json.dumps(config))

    def _keep_only(self, folder: Path) -> None:
        for other in self._state.glob("policy-*"):
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)

    async def _start(self, folder: Path, blueprint: Blueprint, version: int) -> None:
        settings = self._settings
        _set_environment(settings)
        platform, factory, arguments = await asyncio.to_thread(_import_vllm)
        on_cpu = bool(platform.is_cpu())
        memory = psutil.virtual_memory().available if on_cpu else int(platform.get_device_total_memory())
        plan = make_plan(blueprint, spec=self._spec, settings=settings, memory_bytes=memory, on_cpu=on_cpu)
        await self.close()
        self._gone = asyncio.Event()
        started = time.monotonic()
        log.info("starting vLLM for policy %d (%.1f million weights)…", version, blueprint.parameters / 1e6)
        wanted = arguments(
            model=str(folder),
            skip_tokenizer_init=True,
            dtype=self._spec.model.dtype,
            # Logits are never rounded to the model's dtype (docs/protocol.md, section 4).
            hf_overrides={"head_dtype": "float32"},
            generation_config="vllm",
            max_model_len=plan.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            tensor_parallel_size=settings.tensor_parallel_size,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            kv_cache_memory_bytes=plan.kv_cache_bytes,
            # Tracing and compiling a model takes a CPU longer than it saves for the sizes that a CPU runs.
            enforce_eager=settings.enforce_eager or on_cpu,
            enable_prefix_caching=self._prefix_caching,
            stream_interval=self._spec.proofs.chunk_tokens,
            worker_extension_cls="node.engines.vllm_worker.ProvingWorker",
            logits_processors=["node.engines.vllm_worker:ForcedSampling"],
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        try:
            self._launch = vllm_processes.Launch(factory, wanted)
            async with asyncio.timeout(settings.start_seconds):
                self.llm = await self._while_alive(self._launch.llm())
                await self._install(blueprint, version)
        except BaseException as error:
            reason = EngineDied(f"vLLM did not start, its log above says why: {said(error)}")
            await self._end(reason)
            if isinstance(error, Exception):
                raise reason from error
            raise
        log.info("vLLM runs after %.0f s", time.monotonic() - started)
        self.progressed()
        self._watching = asyncio.create_task(self._watch())

    async def _install(self, blueprint: Blueprint, version: int) -> None:
        # Imported here: the module needs vLLM, which this process imports only once it starts it.
        worker = importlib.import_module("node.engines.vllm_worker")
        installation = worker.Installation(
            hidden=blueprint.hidden,
            vocabulary=blueprint.vocabulary,
            proofs=self._spec.proofs,
            temperature=self._spec.sampling.temperature,
            version=version,
        )
        await self.call("veriswarm_install", msgspec.msgpack.encode(installation))

    async def _reload(self, folder: Path, version: int) -> None:
        """Change the weights under the requests; half a change is no policy at all, so it ends the engine."""
        started = time.monotonic()
        try:
            await self._while_alive(self.llm.pause_generation(mode="keep", clear_cache=True))
            await self.call("veriswarm_reload", str(folder), version)
            await self._while_alive(self.llm.resume_generation())
        except BaseException as error:
            reason = EngineDied(f"policy {version} could not be put in place: {said(error)}")
            await self._end(reason)
            if isinstance(error, Exception):
                raise reason from error
            raise
        self.progressed()
        log.debug("policy %d in place after %.2f s", version, time.monotonic() - started)

    # -- the end

    async def _watch(self) -> None:
        """End an engine that is gone or that makes nothing any more: nobody else would notice."""
        while self.llm is not None:
            await asyncio.sleep(WATCH_SECONDS)
            stalled = time.monotonic() - self._progress
            await self.bury()
            late = self._busy() and not self._loading.locked() and stalled > self._settings.stall_seconds
            if self.llm is not None and late:
                await self._end(EngineDied(f"vLLM made no token for {stalled:.0f} s"))

    async def bury(self) -> None:
        """Note at once if vLLM's processes have ended by themselves; whoever uses it again has to load again."""
        if self.llm is not None and self.llm.errored:
            await self._end(EngineDied("vLLM's engine process ended, its log above says why"))

    async def close(self) -> None:
        """End vLLM's processes, and those of a start under way. May be called again; raises EngineDied if they stay."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await self._end(EngineDied("the engine was closed"))

    async def _end(self, reason: EngineDied) -> None:
        """End what runs or starts, in a task of its own: it goes on if whoever waits for it here is cancelled."""
        launch, was_running = self._launch, self.llm is not None
        self.llm = self._launch = self._loaded = None
        self._is_tainted = False
        if launch is not None:
            self._gone.set()
            if was_running:
                self._on_end(reason)
            self._ending = asyncio.create_task(launch.end())
        if self._ending is not None:
            await asyncio.wait({self._ending}, timeout=END_SECONDS)
            if not self._ending.done():
                raise EngineDied(f"vLLM's processes did not end within {END_SECONDS:.0f} s")


def hold(path: Path, link: Path) -> None:
    """Have the file in `path` under the name `link` too, whatever becomes of `path`: where file systems allow it."""
    try:
        os.link(path.resolve(), link)
    except OSError:
        link.symlink_to(path.resolve())


def said(error: BaseException) -> str:
    """An error's kind and sentence, at a length that a log line bears."""
    return f"{type(error).__name__}: {str(error)[:500]}".rstrip(": ")


def _import_vllm() -> tuple[Any, Any, Any]:
    """vLLM's platform, the maker of an AsyncLLM, and of its arguments."""
    platforms = importlib.import_module("vllm.platforms")
    engine = importlib.import_module("vllm.v1.engine.async_llm")
    arguments = importlib.import_module("vllm.engine.arg_utils")
    return platforms.current_platform, engine.AsyncLLM.from_engine_args, arguments.AsyncEngineArgs


def _set_environment(settings: VllmSettings) -> None:
    """vLLM and its processes are configured by environment variables; what a contributor set stays."""
    defaults = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_COLOR": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "PYTHONWARNINGS": "ignore",  # of vLLM's processes: their deprecations are no contributor's
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # A policy comes from the run, never from a hub.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    vllm_processes.own()
    if settings.cpu_threads is not None:
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(settings.cpu_threads))
    if os.environ["VLLM_USE_V2_MODEL_RUNNER"] != "0":
        raise EngineError("VLLM_USE_V2_MODEL_RUNNER is set, but proofs need vLLM's V1 model runner: unset it")


def _same(ours: Blueprint, theirs: Blueprint) -> bool:
    """Whether one engine can hold both: nothing but the weights differs."""
    return bool(ours.config.to_dict() == theirs.config.to_dict())


def _architecture(blueprint: Blueprint) -> str:
    mapping = importlib.import_module("transformers").AutoModelForCausalLM._model_mapping  # noqa: SLF001
    name: str = mapping[type(blueprint.config)].__name__
    return name
