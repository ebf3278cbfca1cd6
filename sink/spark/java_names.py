"""Makes py4j ask the JVM once for each name of a package, a class or a static method.

By default py4j asks at each use. For `jvm.functions`, Java looks for a class of that name in some 300 jars, in each of
the packages that PySpark imports. Building the query of one micro-batch asks 600 times, which is a quarter of what a
small micro-batch takes.
"""

import re
from typing import Any

from py4j import protocol
from py4j.java_gateway import GatewayClient

_QUESTIONS = tuple(
    f"{protocol.REFLECTION_COMMAND_NAME}{kind}"
    for kind in (protocol.REFL_GET_UNKNOWN_SUB_COMMAND_NAME, protocol.REFL_GET_MEMBER_SUB_COMMAND_NAME)
)
# These answers stay true. The value of a static field may change, so py4j asks for it again.
_ANSWERS = (protocol.SUCCESS_PACKAGE, protocol.SUCCESS_CLASS, protocol.SUCCESS + protocol.METHOD_TYPE)
_LIKE_A_CLASS = re.compile(r"(^|\.)[A-Z]\w*$", re.MULTILINE)
_ask = GatewayClient.send_command


def _send_command(self: Any, command: str, retry: bool = True, binary: bool = False) -> Any:
    if not command.startswith(_QUESTIONS):
        return _ask(self, command, retry, binary)
    answers = self.__dict__.setdefault("_remembered", {})
    if command not in answers:
        answer = _ask(self, command, retry, binary)
        is_package = answer.startswith(protocol.SUCCESS_PACKAGE)
        # Java takes any name that it finds no class of for a package's, and not each thread finds each class.
        if not answer.startswith(_ANSWERS) or (is_package and _LIKE_A_CLASS.search(command)):
            return answer
        answers[command] = answer
    return answers[command]


def remember() -> None:
    """Remember the answers of each JVM, from now on, in this process.

    Call it when the JVM has all its jars: with another jar, a package's name may become a class's.
    """
    GatewayClient.send_command = _send_command
