"""The layers models are made of, aware of tensor parallelism through a Communicator. They know no model."""
