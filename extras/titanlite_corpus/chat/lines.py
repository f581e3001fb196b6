"""What a line of a chat source is: a conversation, or a pair of answers, in published layouts.

A conversation is {"messages": [{"role": …, "content": …}, …]}, ShareGPT's {"conversations":
[{"from": …, "value": …}, …]} or Alpaca's {"instruction": …, "input": …, "output": …}. A pair has
"chosen" and "rejected" behind a "prompt" (or "messages"), or as two whole conversations.
"""

from __future__ import annotations

from typing import Any

from titanlite_corpus.chat.render import Message
from titanlite_corpus.chat.template import ASSISTANT, REASONING, Tools

CHAT_KEYS = ("messages", "conversations", "instruction", "input", "output", "system", "tools")
PAIR_KEYS = ("chosen", "rejected", "prompt", "messages", "tools")
_SHAREGPT_ROLES = {"human": "user", "gpt": ASSISTANT, "function_response": "tool"}
_SHAREGPT_ROLES |= {role: role for role in ("system", "user", ASSISTANT, "tool")}


class LeftOutError(Exception):
    """A document that cannot be trained on, and is left out and counted under this name."""


def read_conversation(line: Any, last_only: bool = False) -> tuple[list[Message], Tools]:
    """(messages, tools) of a conversation, in which all answers, or the last one, have text.

    Raises ValueError if `line` is none, and LeftOutError without a text to train on.
    """
    messages = check_messages(_messages_of(line), "messages")
    answers = [message for message in messages if message["role"] == ASSISTANT]
    if not answers:
        raise LeftOutError("no_answer")
    if any(map(_is_empty, answers[-1:] if last_only else answers)):
        raise LeftOutError("empty_answer")
    return messages, _check_tools(line)


def read_pair(line: Any) -> tuple[list[Message], list[Message], Tools]:
    """(chosen, rejected, tools): conversations that differ in their last message, an answer.

    Raises ValueError and LeftOutError as `read_conversation` does.
    """
    prompt = line.get("prompt", line.get("messages"))
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    sides: list[list[Message]] = []
    for key in ("chosen", "rejected"):
        given = line.get(key)
        is_text = isinstance(given, str)
        side = [{"role": ASSISTANT, "content": given}] if is_text else check_messages(given, key)
        if side[0]["role"] == ASSISTANT:  # otherwise it is a whole conversation
            side = [*check_messages(prompt, "prompt"), *side]
        if side[-1]["role"] != ASSISTANT:
            raise ValueError(f'its "{key}" does not end with an answer')
        sides.append(side)
    chosen, rejected = sides
    if chosen[:-1] != rejected[:-1]:
        raise LeftOutError("prompts_differ")
    if _is_empty(chosen[-1]) or _is_empty(rejected[-1]):
        raise LeftOutError("empty_answer")
    return chosen, rejected, _check_tools(line)


def _messages_of(line: Any) -> Any:
    """The messages of a line in any layout, not checked yet; raises ValueError."""
    if "messages" in line:
        return line["messages"]
    if isinstance(turns := line.get("conversations"), list):
        messages = list(map(_from_sharegpt, turns))
    elif "instruction" in line:
        question = [line[key] for key in ("instruction", "input") if line.get(key)]
        if not all(isinstance(text, str) for text in question):
            raise ValueError('its "instruction" and "input" are not strings')
        answer = {"role": ASSISTANT, "content": line.get("output")}
        messages = [{"role": "user", "content": "\n\n".join(question)}, answer]
    else:
        return None
    system = line.get("system")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _from_sharegpt(turn: Any) -> Any:
    """A turn as a message; what has no "from" is checked as a message later."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn
    role = _SHAREGPT_ROLES.get(str(turn["from"]))
    if role is None:
        known = ", ".join(_SHAREGPT_ROLES)
        raise ValueError(f'a turn is "from" {turn["from"]!r:.40}, which is none of {known}')
    return {"role": role, "content": turn.get("value")}


def check_messages(messages: Any, name: str) -> list[Message]:
    """Messages with roles and text; raises ValueError."""
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"it has no list of {name}")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is not an object")
        for key in ("role", "content"):
            only_calls = key == "content" and message.get(key) is None and message.get("tool_calls")
            if not isinstance(message.get(key), str) and not only_calls:
                raise ValueError(f'message {number} has no "{key}" that is a string')
    return messages


def _check_tools(line: Any) -> Tools:
    """A list of objects; raises ValueError."""
    tools = line.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError('its "tools" are not a list of objects')
    return tools


def _is_empty(answer: Message) -> bool:
    """Whether an answer has no text, no reasoning and no calls."""
    more = any(answer.get(key) for key in ("tool_calls", *REASONING))
    return not more and not answer["content"].strip()
