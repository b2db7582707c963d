"""HTTP server with the endpoints of the OpenAI API. It calls AsyncLLM and the pipelines.

Nothing imports it but the CLI and `sensorium.ray`.
"""
