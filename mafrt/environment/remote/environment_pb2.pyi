from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("protocol", "name")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class Description(_message.Message):
    __slots__ = ("protocol", "name", "agents", "num_tasks", "max_steps", "identity", "timeout_s", "costly_reset", "held_out", "max_sessions", "opponents", "names")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    MAX_STEPS_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    COSTLY_RESET_FIELD_NUMBER: _ClassVar[int]
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    OPPONENTS_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    agents: _containers.RepeatedScalarFieldContainer[str]
    num_tasks: int
    max_steps: int
    identity: str
    timeout_s: float
    costly_reset: bool
    held_out: bool
    max_sessions: int
    opponents: bool
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ..., agents: _Optional[_Iterable[str]] = ..., num_tasks: _Optional[int] = ..., max_steps: _Optional[int] = ..., identity: _Optional[str] = ..., timeout_s: _Optional[float] = ..., costly_reset: _Optional[bool] = ..., held_out: _Optional[bool] = ..., max_sessions: _Optional[int] = ..., opponents: _Optional[bool] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class OpenRequest(_message.Message):
    __slots__ = ("held_out", "name", "identity")
    HELD_OUT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    held_out: bool
    name: str
    identity: str
    def __init__(self, held_out: _Optional[bool] = ..., name: _Optional[str] = ..., identity: _Optional[str] = ...) -> None: ...

class Session(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class Closed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("session", "seed", "task")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    session: str
    seed: int
    task: int
    def __init__(self, session: _Optional[str] = ..., seed: _Optional[int] = ..., task: _Optional[int] = ...) -> None: ...

class Message(_message.Message):
    __slots__ = ("role", "json")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    JSON_FIELD_NUMBER: _ClassVar[int]
    role: str
    json: str
    def __init__(self, role: _Optional[str] = ..., json: _Optional[str] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("agent", "text", "messages")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    agent: str
    text: str
    messages: _containers.RepeatedCompositeFieldContainer[Message]
    def __init__(self, agent: _Optional[str] = ..., text: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[Message, _Mapping]]] = ...) -> None: ...

class Reward(_message.Message):
    __slots__ = ("agent", "amount")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    AMOUNT_FIELD_NUMBER: _ClassVar[int]
    agent: str
    amount: float
    def __init__(self, agent: _Optional[str] = ..., amount: _Optional[float] = ...) -> None: ...

class Action(_message.Message):
    __slots__ = ("agent", "text")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    agent: str
    text: str
    def __init__(self, agent: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class ResetReply(_message.Message):
    __slots__ = ("observations", "info", "failure")
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    observations: _containers.RepeatedCompositeFieldContainer[Observation]
    info: str
    failure: Failure
    def __init__(self, observations: _Optional[_Iterable[_Union[Observation, _Mapping]]] = ..., info: _Optional[str] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("session", "number", "actions")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    session: str
    number: int
    actions: _containers.RepeatedCompositeFieldContainer[Action]
    def __init__(self, session: _Optional[str] = ..., number: _Optional[int] = ..., actions: _Optional[_Iterable[_Union[Action, _Mapping]]] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("observations", "rewards", "terminated", "truncated", "info", "failure")
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    observations: _containers.RepeatedCompositeFieldContainer[Observation]
    rewards: _containers.RepeatedCompositeFieldContainer[Reward]
    terminated: bool
    truncated: bool
    info: str
    failure: Failure
    def __init__(self, observations: _Optional[_Iterable[_Union[Observation, _Mapping]]] = ..., rewards: _Optional[_Iterable[_Union[Reward, _Mapping]]] = ..., terminated: _Optional[bool] = ..., truncated: _Optional[bool] = ..., info: _Optional[str] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...
