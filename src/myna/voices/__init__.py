"""Named voices and the consent of the people whose they are."""
