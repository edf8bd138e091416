"""What a person types and reads: the commands, the configuration, the terminal."""
