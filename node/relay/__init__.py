"""The relay daemon and its announcements."""
