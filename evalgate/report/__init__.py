"""From records and verdicts to pages and tables; renders strings, writes nothing."""
