"""How the tests themselves run: their temporary folder, what is run again, and where the time went; pytest plugins."""
