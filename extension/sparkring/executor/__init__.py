"""What everything shares that runs on Spark's executors: orders, the start of processes, and their ends.

Something new that executors should run is an order (a NamedTuple of plain values) and a function. If a task should
carry it out, tasks.py makes the function of the task; if a process should, boot.py starts the process. Executors need
not have sparkring, so this package is sent to tasks by value: it uses only the standard library.
"""
