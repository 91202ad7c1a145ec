"""Every failure that evalgate reports, with the exit code of each (design: pass 0, fail 1, ...).

The tree::

    EvalgateError                     5
    ├── UsageError                    2   the command line asks for something impossible
    │   ├── SpecError                 2   a spec that cannot be run
    │   ├── PolicyError               2   a policy that cannot be applied
    │   └── TaskDataError             2   a data set that cannot be read
    ├── EvidenceError                 4   stored evidence that cannot be read or trusted
    ├── StorageError                  4   a results folder that cannot be written
    ├── ServerError                   4   a server that did not do its part
    │   ├── ServerStartError          4
    │   ├── ServerDiedError           4
    │   └── ServerAnswerError         4   it answered, but not what the protocol promises
    └── InterruptedRunError                 130

A foreign exception is mapped to one of these once, where it is met; the message says what failed,
with which value, and what to do. Failures of single requests are records, not exceptions.
"""

from __future__ import annotations

EXIT_PASS = 0
EXIT_FAIL = 1
EXIT_USAGE = 2
EXIT_INCONCLUSIVE = 3
EXIT_INVALID = 4
EXIT_INTERNAL = 5
EXIT_INTERRUPTED = 130


class EvalgateError(Exception):
    """Base of all failures that carry a sentence for the user."""

    exit_code = EXIT_INTERNAL


class UsageError(EvalgateError):
    exit_code = EXIT_USAGE


class SpecError(UsageError):
    pass


class PolicyError(UsageError):
    pass


class TaskDataError(UsageError):
    pass


class EvidenceError(EvalgateError):
    exit_code = EXIT_INVALID


class StorageError(EvalgateError):
    exit_code = EXIT_INVALID


class ServerError(EvalgateError):
    exit_code = EXIT_INVALID


class ServerStartError(ServerError):
    pass


class ServerDiedError(ServerError):
    pass


class ServerAnswerError(ServerError):
    pass


class InterruptedRunError(EvalgateError):
    exit_code = EXIT_INTERRUPTED
