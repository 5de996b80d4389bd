"""The gRPC door: answers clients of llm-d's time-slicing over our Redis. Extra ``grpc``."""
