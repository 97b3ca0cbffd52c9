"""Numbers that differ from rank to rank, for playing one rank in place of many.

rank_numbers.py     the part that a training run needs
rank_tables.py      a table over axes of a mesh, small however many ranks there are
rank_values.py      `RankValue`: an int that carries its value on every rank
observed_ranks.py   the played rank: its coordinates are RankValues, whose reads are reported
"""
