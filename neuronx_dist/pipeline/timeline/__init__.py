"""Pictures of simulated schedules, and of steps recorded in a trace. `neuronx-dist timeline` draws them.

chart.py      content of a picture: the bars of each stage, and numbers that follow from them; a chart for a terminal
recorded.py   a step of a trace as a chart
scene.py      a chart as shapes on a canvas: computed once, for all formats
svg.py        the shapes as SVG and HTML; png.py: as PNG
command.py    `neuronx-dist timeline`
"""
