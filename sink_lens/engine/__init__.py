"""Forward passes under edits."""
