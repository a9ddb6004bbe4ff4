"""Settings, errors, files, devices, pools and statistics: what every other package stands on."""
