"""Entries: functions that show a program to a tool and return what it found."""
