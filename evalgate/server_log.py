"""Why a vLLM server did not start, out of its log. Knows texts, no process and no file.

A vLLM log ends with a long traceback of the outermost process; the cause stands further up, in
another process's lines.
"""

from __future__ import annotations

import re

_PREFIX = re.compile(
    r"^(\(\w+( \w+)?( ?pid=\d+)?\) )?"
    r"((DEBUG|INFO|WARNING|ERROR|CRITICAL) [\d-]+ [\d:]+ \[[^\]]*\] ?)?"
)
_EXCEPTION = re.compile(r"^(\w+\.)*\w*(Error|Exception|Exit|Interrupt)\b: ?.*")
# What vLLM's outer processes say about a failure that happened elsewhere.
_ECHO = re.compile(r"Engine core initialization failed|WorkerProc initialization failed|See root")

# First match wins: the most telling causes stand first. Each: where it shows, what to tell.
_CAUSES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.MULTILINE), text)
    for pattern, text in (
        (
            r"(?:^|[ \"'])(kernels_patch: .+)",
            "the plug-in refused: {0}",
        ),
        (
            r"error: unrecognized arguments: (.+)",
            "this vLLM does not know the arguments {0}: correct the arm's args",
        ),
        (
            r"error: (argument .+)",
            "an argument was refused: {0}: correct the arm's args",
        ),
        (
            r"(?:max_model_len \(?=?(\d+)\)? is greater than the derived max_model_len)"
            r"[^\d\n]*([\d.]+)",
            "--max-model-len {0} is more than the model's own {1}: lower it in the arm's args",
        ),
        (
            r"(No available memory for the cache blocks)",
            "no memory is left for the KV cache: raise --gpu-memory-utilization (it rules CPU "
            "memory too), or free memory",
        ),
        (
            r"([\d.]+ GiB) KV cache is needed.*?available KV cache memory \(([\d.]+ GiB)\)",
            "one request of full length needs {0} of KV cache and {1} is there: lower "
            "--max-model-len, or give the server more memory",
        ),
        (
            r"(?:Free memory on device|Available memory on node) .*?\(([\d.]+)/([\d.]+) GiB\)"
            r".*?utilization \(([\d.]+)",
            "{0} of {1} GiB memory are free, less than the share {2} asked for: end what "
            "holds it, or lower --gpu-memory-utilization",
        ),
        (
            r"((?:CUDA|HIP) out of memory|OutOfMemoryError|DefaultCPUAllocator: can't allocate"
            r"|std::bad_alloc|MemoryError)",
            "memory ran out ({0}): lower --gpu-memory-utilization or --max-model-len",
        ),
        (
            r"(address already in use|Errno 98\b)",
            "its port was taken by another process ({0}): start again",
        ),
        (
            r"((?:ModuleNotFoundError|ImportError): .+)",
            "an import failed: {0}: install it for the arm's python, or correct that path",
        ),
        (
            r"(No module named \S+)",
            "{0}: set the arm's python to the interpreter of the build",
        ),
        (
            r"(\S+) is not a local folder and is not a valid model identifier",
            "there is no model {0}: correct model.path",
        ),
        (
            r"(Invalid repository ID or local directory specified: ?\S*"
            r"|Repo id must be .+|does not appear to have a file named .+"
            r"|Repository Not Found.*|couldn't connect to .+|Can't load the configuration of .+"
            r"|No such file or directory: .+)",
            "the model could not be read ({0}): correct model.path",
        ),
    )
)


def explain_log(text: str) -> str | None:
    """The cause of a failed start as a sentence with its remedy, or the log's own last error.

    None when the log names none.
    """
    lines = [_strip(line) for line in text.splitlines()]
    plain = "\n".join(lines)
    for pattern, sentence in _CAUSES:
        if found := pattern.search(plain):
            return sentence.format(*(group.strip().rstrip(".,") for group in found.groups()))
    errors = [line for line in lines if _EXCEPTION.match(line) and not _ECHO.search(line)]
    return errors[-1][:500] if errors else None


def find_last_line(text: str) -> str | None:
    """The last line that says something, an error before anything else; None of an empty log."""
    lines = [line for line in map(_strip, text.splitlines()) if line.strip()]
    errors = [line for line in lines if _EXCEPTION.match(line) and not _ECHO.search(line)]
    return (errors or lines or [None])[-1]


def _strip(line: str) -> str:
    """A line without the process and the time that vLLM puts before it."""
    return _PREFIX.sub("", line.strip()).strip()
