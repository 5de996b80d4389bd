--[[
The time of the server that has the key, in milliseconds.
KEYS  1 any key
Reply milliseconds
--]]
local stamp = redis.call('TIME')
return stamp[1] * 1000 + math.floor(stamp[2] / 1000)
