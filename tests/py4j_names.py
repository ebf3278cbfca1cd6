"""py4j asks the JVM once for each name of a package, a class or a static method.

By default it asks at each use: `jvm.functions` means that Java looks for a class of that name in some 300 jars, in
each of the packages that PySpark imports. Building one micro-batch's query asks 600 times. That was a quarter of what
a short streaming query takes.
"""

from typing import Any

from py4j import protocol
from py4j.java_gateway import GatewayClient

_QUESTIONS = tuple(
    f"{protocol.REFLECTION_COMMAND_NAME}{kind}"
    for kind in (protocol.REFL_GET_UNKNOWN_SUB_COMMAND_NAME, protocol.REFL_GET_MEMBER_SUB_COMMAND_NAME)
)
# Only what stays: the value of a static field is asked for again.
_ANSWERS = (protocol.SUCCESS_PACKAGE, protocol.SUCCESS_CLASS, protocol.SUCCESS + protocol.METHOD_TYPE)


def remember() -> None:
    """From now on, in this process. To be called when the JVM has all its jars: a package's name may become a class's
    with another jar.
    """
    ask = GatewayClient.send_command

    def send_command(self: Any, command: str, retry: bool = True, binary: bool = False) -> Any:
        if not command.startswith(_QUESTIONS):
            return ask(self, command, retry, binary)
        answers = self.__dict__.setdefault("_remembered", {})
        if command not in answers:
            answer = ask(self, command, retry, binary)
            if not answer.startswith(_ANSWERS):
                return answer
            answers[command] = answer
        return answers[command]

    GatewayClient.send_command = send_command
