"""Bytes on disk, read without trusting them: Hugging Face folders, safetensors, DCP, digests."""
