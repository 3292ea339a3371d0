from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DTYPE_UNSPECIFIED: _ClassVar[DType]
    DTYPE_F16: _ClassVar[DType]
    DTYPE_BF16: _ClassVar[DType]
    DTYPE_F32: _ClassVar[DType]
DTYPE_UNSPECIFIED: DType
DTYPE_F16: DType
DTYPE_BF16: DType
DTYPE_F32: DType

class Tensor(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: DType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[_Union[DType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class MatMulRequest(_message.Message):
    __slots__ = ("layer", "layers", "output_dtype", "priority", "x")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_DTYPE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    X_FIELD_NUMBER: _ClassVar[int]
    layer: str
    layers: _containers.RepeatedScalarFieldContainer[str]
    output_dtype: DType
    priority: int
    x: Tensor
    def __init__(self, layer: _Optional[str] = ..., layers: _Optional[_Iterable[str]] = ..., output_dtype: _Optional[_Union[DType, str]] = ..., priority: _Optional[int] = ..., x: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...

class MatMulResponse(_message.Message):
    __slots__ = ("timings", "y")
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    timings: _containers.RepeatedCompositeFieldContainer[Timing]
    y: _containers.RepeatedCompositeFieldContainer[Tensor]
    def __init__(self, timings: _Optional[_Iterable[_Union[Timing, _Mapping]]] = ..., y: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ...) -> None: ...

class Timing(_message.Message):
    __slots__ = ("layer", "batch_rows", "queue_nanoseconds", "kernel_nanoseconds", "total_nanoseconds")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    BATCH_ROWS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    KERNEL_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    layer: str
    batch_rows: int
    queue_nanoseconds: int
    kernel_nanoseconds: int
    total_nanoseconds: int
    def __init__(self, layer: _Optional[str] = ..., batch_rows: _Optional[int] = ..., queue_nanoseconds: _Optional[int] = ..., kernel_nanoseconds: _Optional[int] = ..., total_nanoseconds: _Optional[int] = ...) -> None: ...

class StreamRequest(_message.Message):
    __slots__ = ("request_id", "timeout_nanoseconds", "traceparent", "want_timing", "call", "cancel")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    WANT_TIMING_FIELD_NUMBER: _ClassVar[int]
    CALL_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    timeout_nanoseconds: int
    traceparent: str
    want_timing: bool
    call: MatMulRequest
    cancel: Cancel
    def __init__(self, request_id: _Optional[int] = ..., timeout_nanoseconds: _Optional[int] = ..., traceparent: _Optional[str] = ..., want_timing: bool = ..., call: _Optional[_Union[MatMulRequest, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StreamResponse(_message.Message):
    __slots__ = ("request_id", "error", "going_away", "result")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    GOING_AWAY_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    request_id: int
    error: Error
    going_away: GoingAway
    result: MatMulResponse
    def __init__(self, request_id: _Optional[int] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., going_away: _Optional[_Union[GoingAway, _Mapping]] = ..., result: _Optional[_Union[MatMulResponse, _Mapping]] = ...) -> None: ...

class GoingAway(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retry_after_nanoseconds")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_NANOSECONDS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    retry_after_nanoseconds: int
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., retry_after_nanoseconds: _Optional[int] = ...) -> None: ...

class ListLayersRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListLayersResponse(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[Layer]
    def __init__(self, layers: _Optional[_Iterable[_Union[Layer, _Mapping]]] = ...) -> None: ...

class Layer(_message.Message):
    __slots__ = ("name", "model", "n", "k", "bits", "group_size", "symmetric", "has_bias", "scale_dtype", "device", "packed_bytes", "sweet_spot_rows")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    BITS_FIELD_NUMBER: _ClassVar[int]
    GROUP_SIZE_FIELD_NUMBER: _ClassVar[int]
    SYMMETRIC_FIELD_NUMBER: _ClassVar[int]
    HAS_BIAS_FIELD_NUMBER: _ClassVar[int]
    SCALE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SWEET_SPOT_ROWS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    n: int
    k: int
    bits: int
    group_size: int
    symmetric: bool
    has_bias: bool
    scale_dtype: DType
    device: str
    packed_bytes: int
    sweet_spot_rows: int
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., n: _Optional[int] = ..., k: _Optional[int] = ..., bits: _Optional[int] = ..., group_size: _Optional[int] = ..., symmetric: bool = ..., has_bias: bool = ..., scale_dtype: _Optional[_Union[DType, str]] = ..., device: _Optional[str] = ..., packed_bytes: _Optional[int] = ..., sweet_spot_rows: _Optional[int] = ...) -> None: ...

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "layout_version", "device", "read_peak_bytes_per_second", "max_message_bytes", "max_request_bytes", "max_request_rows", "models", "batch_invariant", "max_response_bytes")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    READ_PEAK_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUEST_ROWS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    MAX_RESPONSE_BYTES_FIELD_NUMBER: _ClassVar[int]
    version: str
    layout_version: int
    device: str
    read_peak_bytes_per_second: int
    max_message_bytes: int
    max_request_bytes: int
    max_request_rows: int
    models: _containers.RepeatedScalarFieldContainer[str]
    batch_invariant: bool
    max_response_bytes: int
    def __init__(self, version: _Optional[str] = ..., layout_version: _Optional[int] = ..., device: _Optional[str] = ..., read_peak_bytes_per_second: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., max_request_bytes: _Optional[int] = ..., max_request_rows: _Optional[int] = ..., models: _Optional[_Iterable[str]] = ..., batch_invariant: bool = ..., max_response_bytes: _Optional[int] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("layers", "packed_bytes")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    layers: int
    packed_bytes: int
    def __init__(self, layers: _Optional[int] = ..., packed_bytes: _Optional[int] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "state", "layers", "packed_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    PACKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    layers: int
    packed_bytes: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., layers: _Optional[int] = ..., packed_bytes: _Optional[int] = ...) -> None: ...
