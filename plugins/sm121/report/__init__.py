"""The reports of runs: pages, tables, charts, junit.xml, comparisons and histories."""
