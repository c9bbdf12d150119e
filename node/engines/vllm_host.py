"""vLLM's processes and the policy they hold: started, checked, reloaded, watched and ended.

Shared by `node.engines.vllm`, which draws completions, and `node.engines.vllm_prefill`, which verifies them. It drives
`AsyncLLM` from the caller's event loop; `node.engines.vllm_worker` runs beside the model. Policies come only from the
run: vLLM gets a folder with a configuration checked by `node.policy.file`, and is set offline (docs/adr/0010-vllm.md).
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
from node.engines.base import BrokenPolicy, EngineDied, NoPolicy
from node.engines.vllm_settings import VllmSettings, make_plan
from node.policy.families import ATTENTION_FAMILIES
from node.policy.file import Blueprint
from node.policy.reading import inspect_once
from node.protocol.profiles import Hardware, hardware_of
from node.protocol.run import ProofSpec, RunSpec

log = logging.getLogger(__name__)

T = TypeVar("T")

RPC_SECONDS = 600.0
SHUTDOWN_TIMEOUT_S = 30.0
WATCH_SECONDS = 1.0
WEIGHTS = "model.safetensors"


class VllmHost:
    """One AsyncLLM and its policy. `state` is a private folder from which vLLM reads policies.

    `busy` returns whether tokens are expected; `on_end` is called once with the reason when the engine ends.
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
        self._processes_ended = asyncio.Event()
        self._launch: vllm_processes.Launch | None = None
        self._ending: asyncio.Task[None] | None = None

    @property
    def version(self) -> int | None:
        """Version of the loaded policy; None if there is none."""
        return self._loaded[1] if self._loaded else None

    @property
    def policy(self) -> Blueprint:
        """The loaded policy; raises NoPolicy."""
        if self._loaded is None:
            raise NoPolicy("no policy is loaded yet")
        return self._loaded[0]

    def taint(self) -> None:
        """Note that the policy produced non-finite numbers, so that the next one gets a new engine.

        A cache that holds such numbers spoils what is read beside them, masked or not.
        """
        self._is_tainted = True

    def progressed(self) -> None:
        """Reset the stall timer: the engine produced something, or was given work after idling."""
        self._progress = time.monotonic()

    async def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method` in each of vLLM's worker processes; return their results by rank."""
        if self.llm is None:
            raise EngineDied("vLLM is not running")
        results: list[Any] = await self._while_alive(
            self.llm.collective_rpc(method, timeout=RPC_SECONDS, args=arguments)
        )
        return results

    async def _while_alive(self, request: Coroutine[Any, Any, T]) -> T:
        """Await vLLM's response; raises EngineDied if its processes end first, as vLLM itself would wait forever."""
        task, ended = asyncio.create_task(request), asyncio.create_task(self._processes_ended.wait())
        try:
            await asyncio.wait({task, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineDied("vLLM's engine process ended (see its log above)")
            return task.result()
        finally:
            task.cancel()
            ended.cancel()

    async def hardware(self) -> Hardware:
        """Return what vLLM computes on here, as `Engine.hardware`; imports a part of it, and starts nothing."""
        _set_environment(self._settings)
        return await asyncio.to_thread(_hardware, self._settings, self._spec)

    async def prove(self, proofs: ProofSpec) -> None:
        """Prove as `proofs` says from now on; raises ValueError for chunks of another size."""
        if proofs.chunk_tokens != self._spec.proofs.chunk_tokens:
            raise ValueError("a running engine keeps the size of its chunks")
        self._spec = msgspec.structs.replace(self._spec, proofs=proofs)
        await self.call("swarmproof_prove", msgspec.msgpack.encode(proofs))

    # -- policies

    async def load(self, path: Path, *, version: int) -> None:
        """Load the policy in `path` as `Engine.load` specifies; starts vLLM if needed.

        Raises PolicyError and DoesNotFit with nothing changed, and EngineDied with nothing running any more.
        """
        async with self._loading:
            folder = await asyncio.to_thread(self._stage_policy, path, version)
            try:
                self._loaded = await self._load_folder(folder, version), version
            except BaseException:
                # Any kind: its file would fill the disk, however often its owner deletes it.
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                raise
            await asyncio.to_thread(self._remove_other_policies, folder)

    async def _load_folder(self, folder: Path, version: int) -> Blueprint:
        blueprint = await asyncio.to_thread(inspect_once, folder / WEIGHTS)
        if blueprint.hidden < self._spec.proofs.min_hidden:
            raise BrokenPolicy(f"{blueprint.hidden} hidden units are too few for the run's proofs")
        await asyncio.to_thread(self._write_config, folder, blueprint)
        if self.llm is not None and self._loaded is not None and self._can_reload(blueprint):
            await self._reload(folder, version)
        else:
            await self._start(folder, blueprint, version)
        return blueprint

    def _stage_policy(self, path: Path, version: int) -> Path:
        """Create our own folder with the policy file under the name vLLM expects, independent of `path`'s fate."""
        folder = self._state / f"policy-{version}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # The supplier of policies deletes old ones, possibly between inspection and vLLM's read.
        link_file(path, folder / WEIGHTS)
        return folder

    def _can_reload(self, blueprint: Blueprint) -> bool:
        """Return whether the running engine can take these weights."""
        return not self._is_tainted and self.policy.has_architecture_of(blueprint)

    def _write_config(self, folder: Path, blueprint: Blueprint) -> None:
        """Write our checked configuration for vLLM."""
        # vLLM asks for fields that a family's own configuration class leaves out: since they have one value, or follow
        # from others where they are not given.
        family, config = ATTENTION_FAMILIES[blueprint.config.model_type], blueprint.config
        asked: dict[str, Any] = {name: values[0] for name, values in family.fixed.items()}
        if "head_dim" in family.undeclared:
            asked["head_dim"] = config.hidden_size // config.num_attention_heads
        written = (
            asked
            | config.to_dict()
            | {
                "architectures": [_architecture(blueprint)],
                "dtype": self._spec.model.dtype,
            }
        )
        (folder / "config.json").write_text(json.dumps(written))

    def _remove_other_policies(self, folder: Path) -> None:
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
        self._processes_ended = asyncio.Event()
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
            # On a CPU, tracing and compiling takes longer than it saves at the sizes a CPU runs.
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
            reason = EngineDied(f"vLLM did not start (see its log above): {describe_error(error)}")
            await self._end(reason)
            if isinstance(error, Exception):
                raise reason from error
            raise
        log.info("vLLM started in %.0f s", time.monotonic() - started)
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
        await self.call("swarmproof_install", msgspec.msgpack.encode(installation))

    async def _reload(self, folder: Path, version: int) -> None:
        """Reload the weights under running requests; a failure midway ends the engine."""
        started = time.monotonic()
        try:
            await self._while_alive(self.llm.pause_generation(mode="keep", clear_cache=True))
            await self.call("swarmproof_reload", str(folder), version)
            await self._while_alive(self.llm.resume_generation())
        except BaseException as error:
            reason = EngineDied(f"policy {version} could not be loaded: {describe_error(error)}")
            await self._end(reason)
            if isinstance(error, Exception):
                raise reason from error
            raise
        self.progressed()
        log.debug("policy %d loaded in %.2f s", version, time.monotonic() - started)

    # -- shutdown

    async def _watch(self) -> None:
        """End an engine that died or stalled: nobody else would notice."""
        while self.llm is not None:
            await asyncio.sleep(WATCH_SECONDS)
            stalled = time.monotonic() - self._progress
            await self.check_alive()
            late = self._busy() and not self._loading.locked() and stalled > self._settings.stall_seconds
            if self.llm is not None and late:
                await self._end(EngineDied(f"vLLM produced no token for {stalled:.0f} s"))

    async def check_alive(self) -> None:
        """End the engine at once if vLLM's processes died; it must then be loaded again."""
        if self.llm is not None and self.llm.errored:
            await self._end(EngineDied("vLLM's engine process ended (see its log above)"))

    async def close(self) -> None:
        """End vLLM's processes, including a start in progress; idempotent. Raises EngineDied if they do not end."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        await self._end(EngineDied("engine was closed"))

    async def _end(self, reason: EngineDied) -> None:
        """End what runs or starts, in its own task, which continues if the caller is cancelled."""
        launch, was_running = self._launch, self.llm is not None
        self.llm = self._launch = self._loaded = None
        self._is_tainted = False
        if launch is not None:
            self._processes_ended.set()
            if was_running:
                self._on_end(reason)
            self._ending = asyncio.create_task(launch.end())
        if self._ending is not None:
            await asyncio.wait({self._ending}, timeout=SHUTDOWN_TIMEOUT_S)
            if not self._ending.done():
                raise EngineDied(f"vLLM's processes did not end within {SHUTDOWN_TIMEOUT_S:.0f} s")


def link_file(path: Path, link: Path) -> None:
    """Hard-link `path` as `link`, so that it survives deletion; falls back to a symbolic link."""
    try:
        os.link(path.resolve(), link)
    except OSError:
        link.symlink_to(path.resolve())


def describe_error(error: BaseException) -> str:
    """Describe an error by its type and a message of bounded length."""
    return f"{type(error).__name__}: {str(error)[:500]}".rstrip(": ")


def _import_vllm() -> tuple[Any, Any, Any]:
    """Import vLLM; return its platform, AsyncLLM factory and argument class."""
    platforms = importlib.import_module("vllm.platforms")
    engine = importlib.import_module("vllm.v1.engine.async_llm")
    arguments = importlib.import_module("vllm.engine.arg_utils")
    return platforms.current_platform, engine.AsyncLLM.from_engine_args, arguments.AsyncEngineArgs


def _hardware(settings: VllmSettings, spec: RunSpec) -> Hardware:
    # It asks the driver's library: initialising CUDA in this process would take memory from vLLM's own.
    platform = importlib.import_module("vllm.platforms").current_platform
    device, gpus = "CPU" if platform.is_cpu() else str(platform.get_device_name()), settings.tensor_parallel_size
    version = importlib.import_module("vllm").__version__
    return hardware_of(f"{gpus} x {device}" if gpus > 1 else device, f"vllm {version}", spec.model.dtype)


def _set_environment(settings: VllmSettings) -> None:
    """Set vLLM's environment variables; existing ones are kept."""
    defaults = {
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_LOGGING_COLOR": "0",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # On a GPU the attention of a float32 policy is a Triton kernel, which would multiply in TF32.
        "TRITON_F32_DEFAULT": "ieee",
        # Tokens are forced, so that no sampler is asked; FlashInfer's would be looked for, and compiled, at the start.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "PYTHONWARNINGS": "ignore",  # of vLLM's processes: their deprecations are no contributor's
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        # A policy comes from the run, never from a hub.
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    vllm_processes.set_owner()
    if settings.cpu_threads is not None:
        os.environ.update(VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS=str(settings.cpu_threads))


def _architecture(blueprint: Blueprint) -> str:
    mapping = importlib.import_module("transformers").AutoModelForCausalLM._model_mapping  # noqa: SLF001
    name: str = mapping[type(blueprint.config)].__name__
    return name
