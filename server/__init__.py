"""HTTP server with the endpoints of the OpenAI API. It calls AsyncLLM and the pipelines; nothing imports it but the CLI."""
