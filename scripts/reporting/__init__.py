"""The report of one or several runs: reading run folders, and the HTML page made of them."""
