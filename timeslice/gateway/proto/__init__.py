"""The two interfaces as protoc wrote them from the .proto files beside; scripts/protos writes them anew."""
