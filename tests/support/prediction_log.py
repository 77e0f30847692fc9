"""The message of a warm-up request, as tensorflow-serving-api declares it."""

import functools

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

TENSOR = ".tensorflow.TensorProto"


@functools.cache
def message_class():
    """Returns PredictionLog, with the numbers that its fields have in tensorflow-serving-api."""
    pool = descriptor_pool.Default()
    text, message = descriptor_pb2.FieldDescriptorProto.TYPE_STRING, descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
    file = descriptor_pb2.FileDescriptorProto(name="warmup_test.proto", package="warmup_test", syntax="proto3")
    file.dependency.append("tensorflow/core/framework/tensor.proto")

    def add(parent, name, *fields):
        made = parent.add(name=name)
        for field, number, of in fields:
            kind = {"type": text} if of is None else {"type": message, "type_name": of}
            made.field.add(name=field, number=number, label=1, **kind)
        return made

    add(file.message_type, "ModelSpec", ("name", 1, None), ("signature_name", 3, None))
    request = add(file.message_type, "PredictRequest", ("model_spec", 1, ".warmup_test.ModelSpec"))
    inputs = add(request.nested_type, "InputsEntry", ("key", 1, None), ("value", 2, TENSOR))
    inputs.options.map_entry = True
    request.field.add(
        name="inputs", number=2, label=3, type=message, type_name=".warmup_test.PredictRequest.InputsEntry"
    )
    add(file.message_type, "PredictLog", ("request", 1, ".warmup_test.PredictRequest"))
    add(file.message_type, "PredictionLog", ("predict_log", 6, ".warmup_test.PredictLog"))
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("warmup_test.PredictionLog"))
