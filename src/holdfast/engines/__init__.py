"""What a step runs on."""
