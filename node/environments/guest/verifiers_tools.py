"""Toolsets of `verifiers.v1`, called in this process instead of through their servers.

Names, schemas and what a failed call is told are those that the package's servers and its chat harness give them.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from typing import Any

from .adapter import Json, Unusable


def _check_toolsets(toolsets: Iterable[Any]) -> None:
    """Raise Unusable for toolsets that run elsewhere."""
    for toolset in toolsets:
        runtime = getattr(toolset.config, "runtime", None)
        if getattr(toolset.config, "url", None):
            raise Unusable("refused_environment", f"its tools {toolset.server_name!r} are on another machine")
        if runtime is not None and getattr(runtime, "type", "subprocess") != "subprocess":
            raise Unusable("refused_environment", f"its tools {toolset.server_name!r} need a {runtime.type} runtime")


class ToolServers:
    """The toolsets of a task, or those that all tasks of a taskset share."""

    def __init__(self, toolsets: Iterable[Any], *, shared: bool = False) -> None:
        self._toolsets = list(toolsets)
        self._shared = shared
        _check_toolsets(self._toolsets)
        self._servers = {toolset.server_name: _server_of(toolset) for toolset in self._toolsets}
        self._names: dict[str, tuple[Any, Any, str]] = {}
        for toolset in self._toolsets:
            server = self._servers[toolset.server_name]
            for tool in server._tool_manager.list_tools():  # noqa: SLF001  (its public list is a coroutine)
                full = f"{toolset.server_name}_{tool.name}" if toolset.server_name else tool.name
                self._names[full] = (toolset, server, tool.name)

    async def start(self, data: Any = None) -> None:
        """Run the toolsets' own preparation, with a task's data where they are its own."""
        for toolset in self._toolsets:
            await toolset.setup()
            if not self._shared:
                await toolset.setup_task(data)

    def schemas(self) -> list[Json]:
        """Return the tools' schemas, in the order of the toolsets."""
        return [
            {"name": full, "description": tool.description or "", "parameters": tool.parameters}
            for full, (_, server, name) in self._names.items()
            for tool in server._tool_manager.list_tools()  # noqa: SLF001
            if tool.name == name
        ]

    def has(self, name: str) -> bool:
        """Return whether there is a tool of that name."""
        return name in self._names

    async def call(self, name: str, arguments: str, trace: Any) -> str:
        """Return what a tool says to a call, or what is wrong with the call."""
        toolset, server, raw = self._names[name]
        try:
            given = json.loads(arguments or "{}")
        except ValueError as error:
            return f"error: invalid JSON in tool arguments ({error}); resend the call with valid JSON"
        if not isinstance(given, dict):
            kind = type(given).__name__
            return f"error: tool arguments must be a JSON object, got {kind}; resend as an object"
        _share_state(toolset, trace)
        try:
            result = await server.call_tool(raw, given)
        except Unusable:
            raise
        except Exception as error:  # noqa: BLE001  (a server tells the model)
            return str(error)
        return _text(result)


def _server_of(toolset: Any) -> Any:
    """Return the MCP server that the package would run for a toolset, with its tools."""
    try:
        server = importlib.import_module("mcp.server.mcpserver").MCPServer
    except ImportError:  # up to mcp 1
        server = importlib.import_module("mcp.server.fastmcp").FastMCP
    made = server(toolset.server_name or type(toolset).__name__)
    toolset.register(made)
    return made


def _share_state(toolset: Any, trace: Any) -> None:
    """Let a toolset read and write the trace's state, each time as a copy, as its server's channel does."""
    adapter = toolset._state_adapter  # noqa: SLF001  (what its own methods use)

    async def pull() -> Any:
        return adapter.validate_json(type(trace.state).model_dump_json(trace.state))

    async def push(before: bytes) -> None:
        current = importlib.import_module("verifiers.v1.mcp.server")._call_state.get()  # noqa: SLF001
        after = adapter.dump_json(current)
        if after != before:
            trace.state = type(trace.state).model_validate_json(after)

    toolset._pull_state, toolset._push_state = pull, push  # noqa: SLF001


def _text(result: Any) -> str:
    """Return the text of a tool's result, as the package's harness tells it."""
    content = getattr(result, "content", None)
    if content is None:  # up to mcp 1: the blocks, or the blocks and the structure
        content = result[0] if isinstance(result, tuple) else result
    blocks = list(content)
    if any(getattr(block, "type", "text") == "image" for block in blocks):
        raise Unusable("refused_environment", "its tools answer with images")
    text = "\n".join(block.text if block.type == "text" else str(block) for block in blocks) if blocks else str(blocks)
    try:
        shorten = importlib.import_module("verifiers.v1.harnesses.utils.compaction").truncate_tool_output
    except (ImportError, AttributeError):  # before 0.4
        return text
    return str(shorten(text))
