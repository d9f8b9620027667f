"""Speed beside other programs, on one machine and in turns."""
