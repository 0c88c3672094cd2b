"""Plots of runs over their steps, for pages of several commands: what is drawn, and the script that draws.

uPlot draws the plots on canvases: a dense line is reduced to its extremes in each column of pixels, so that
no spike is lost at any zoom.
"""
