module trackbed.internal/lab/pause

go 1.23
