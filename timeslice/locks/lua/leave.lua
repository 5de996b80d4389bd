--[[
An agent leaves the group. It moved nothing: while state of jobs is on its node, it is waited for.
ARGV  1 floor  2 node  then the jobs of which it has just seen nothing there: one that was let in is only taken to be,
      unless it has a process there that the agent has not reported as ended
Reply ok (also when it was not there) | stays (it counts as silent now)
Events NodeLeft, and what advance and reap emit
--]]
-- @include group waiters gangs residency nodes lease advance
local node, absent = ARGV[2], {}
for i = 3, #ARGV do
  absent[ARGV[i]] = true
end

begin(true)
if not redis.call('ZSCORE', nodes_key, node) then
  return { 'ok' }
end
settle_clock()
for _, field in ipairs(redis.call('HKEYS', targets_key)) do
  local job, at = string.match(field, '^([^/]+)/([^/]+)/')
  if at == node then
    absent[job] = nil -- it came after the look, or may not be watched: what it has there nobody has seen
  end
end
local stays = false
for job, where in pairs((node_record(node))) do
  stays = stays or not (absent[job] and where == 'resident')
end
if stays then
  -- Nobody else can vouch for what is on it: until the agent returns the group treats it as out of reach.
  redis.call('ZADD', nodes_key, now - 1, node)
  set('changed_ms', now)
  wake('members')
else
  node_remove(node, 'agent', '', '')
end
reap()
advance()
save()
return { stays and 'stays' or 'ok' }
