"""Other libraries' function signatures over undertow's operators: change one import."""
