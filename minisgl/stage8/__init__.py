"""Stage 8: the server. Processes that speak over ZMQ, and an OpenAI-compatible API in front of them."""
