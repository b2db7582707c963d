"""Parsers of answers: they split reasoning and tool calls from the text."""
