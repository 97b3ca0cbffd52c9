"""Pictures of schedules: simulated ones, and steps that were recorded in a trace. `neuronx-dist timeline` draws them.

chart.py      what is drawn: the bars of each stage, and what follows from them
recorded.py   a step of a trace as a chart
scene.py      a chart as shapes on a canvas: computed once, for all formats
svg.py        the shapes as SVG and HTML; png.py: as PNG; text.py: a chart for a terminal
command.py    `neuronx-dist timeline`
"""
