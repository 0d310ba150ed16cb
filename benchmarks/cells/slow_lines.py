import time

for _ in range(30):
    print(f"at {time.time():.6f}")
    time.sleep(0.1)
