"""The commands that join `metanudge`: one a file."""
