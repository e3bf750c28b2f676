module trackbed.internal/read-request

go 1.24
