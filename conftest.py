pytest_plugins = ["sm121.plugin"]
