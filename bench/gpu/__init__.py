"""What a GPU decodes, how it is set, and what is lost on the way; or its twin on the CPU."""
